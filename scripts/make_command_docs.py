"""Write docs/commands.md from the command line program: every command with its arguments, options and one example.

`python scripts/make_command_docs.py` writes it; `--check` exits 1 when the file is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from gspo.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
INTRO = """# Commands

<!-- Written by scripts/make_command_docs.py from the command line program. Do not edit. -->

`gspo COMMAND --help` prints the same text. Commands that take `[CONFIG] [KEY=VALUE …]` accept a YAML file, any
[configuration key](configuration.md) as `key=value`, and any key or alias as a flag (`--learning_rate 1e-6`).
The exit codes are on [a page of their own](exit-codes.md).
"""
# Command → one example, and what it does.
EXAMPLES: dict[str, tuple[str, str]] = {
    "env list": ("gspo env list", "The built-in environments."),
    "env show": (
        "gspo env show calculator",
        "What the calculator is, its arguments, and its tool as the model sees it.",
    ),
    "env try": ("printf '32\\n16\\n' | gspo env try guess", "Two guesses by hand."),
    "train": (
        "gspo train trainer.total_training_steps=10 trainer.experiment_name=short",
        "Train the embedded model for 10 steps into `runs/short`.",
    ),
    "recipes": ("gspo recipes", "The named recipes, each with what it does."),
    "eval": (
        "gspo eval embedded --data arithmetic --limit 64 --n 4",
        "Greedy accuracy, and mean, best and majority of 4 sampled answers, on 64 held-out questions.",
    ),
    "branch": (
        "gspo branch runs/embedded-arithmetic-001@18 slower actor_rollout_ref.actor.optim.lr=2e-5",
        "goes on from step 18 with a lower learning rate, in a new run folder",
    ),
    "sft": (
        "gspo sft --out warm --data arithmetic --steps 20 --batch-size 16",
        "Fine-tune the embedded model on 20 batches of answers and write it to `warm`.",
    ),
    "rm": (
        "gspo rm --out scores --data arithmetic --steps 20 --batch-size 16",
        "Train a reward model from the embedded model on 20 batches of pairs and write it to `scores`.",
    ),
    "config show": (
        "gspo config show --diff data.train_batch_size=64",
        "Print the values that differ from the defaults, each with its origin.",
    ),
    "config import": (
        "gspo config import recipes/areal/gsm8k_gspo.yaml --to my.yaml",
        "Turn a file in AReaL's names into YAML of this program.",
    ),
    "config explain": ("gspo config explain clip_ratio_low", "Explain one key."),
    "data list": ("gspo data list", "Print the names of the built-in datasets."),
    "data show": ("gspo data show arithmetic --n 1", "Check all rows and print the first."),
    "rewards try": (
        'echo "14+76=90;90+16=106;106" | gspo rewards try --task arithmetic --answer -',
        "Grade one response to the first row of `arithmetic`.",
    ),
    "rewards bench": ("gspo rewards bench --seconds 0.5", "Measure how fast rewards are computed here."),
    "rewards sandbox": ("gspo rewards sandbox --level 2", "Test isolation level 2 on this machine."),
    "validate": ("gspo validate --quick", "Check the formulas, without training."),
    "doctor": (
        "gspo doctor --no-model actor_rollout_ref.actor.optim.lr=1e-6",
        "Examine the environment and the config, without loading the weights.",
    ),
    "replay": (
        "gspo replay runs/short --losses gspo,vanilla --steps 1-3",
        "What two losses would have made of the groups of steps 1 to 3.",
    ),
    "report": ("gspo report runs/short", "Write `report.html`, `plots/` and `RUN.md` of a run."),
    "dashboard": ("gspo dashboard runs --port 0", "Show all runs in a browser, on a free port."),
    "compare": ("gspo compare runs/short runs/other", "Compare two runs question by question."),
    "chat": ("gspo chat embedded --temperature 0", "Talk to the embedded model, greedily."),
    "generate": (
        "gspo generate embedded arithmetic --limit 4 --n 2 --max-tokens 64 --out answers.jsonl",
        "Two answers to each of the first four questions of a task.",
    ),
    "push": (
        "gspo push runs/short owner/name --dry-run",
        "What would be uploaded of a run's newest checkpoint, with its model card.",
    ),
    "serve": ("gspo serve embedded --port 0", "Serve the embedded model with OpenAI's API, on a free port."),
    "sweep": ("gspo sweep lr.yaml --dry-run", "Check a file of settings and print the runs that it makes."),
    "plan": ("gspo plan --model 7b --gpus 64 --gpu h200", "Predict step time, memory and the best split of 64 H200."),
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be run, as (its words after `gspo`, the command), in the order of the help."""
    yield from _below(get_command(app), "")


def _below(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        yield from _below(command.get_command(None, name), f"{words} {name}".strip())


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _argument_name(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _usage(words: str, command: Any) -> str:
    names = [_argument_name(p) for p in command.params if _is_argument(p)]
    required = [f"{p.opts[0]} {_value_name(p)}" for p in _options(command) if p.required]
    optional = ["[OPTIONS]"] if any(not p.required for p in _options(command)) else []
    return " ".join(["gspo", words, *names, *required, *optional])


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if not _is_argument(p) and not p.hidden]


def _value_name(option: Any) -> str:
    return option.metavar or option.opts[0].lstrip("-").replace("-", "_").upper()


def _option_text(option: Any) -> str:
    names = "`, `".join([*option.opts, *option.secondary_opts])
    return f"`{names}`" if option.is_flag else f"`{names} {_value_name(option)}`"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default is None or parameter.default is False:
        return ""
    if parameter.default is True:
        return f"`{parameter.opts[0]}`"
    return f"`{parameter.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(command: Any) -> list[str]:
    rows = [
        (f"`{_argument_name(p)}`" if _is_argument(p) else _option_text(p), _default(p), p.help or "")
        for p in [*filter(_is_argument, command.params), *_options(command)]
    ]
    if not rows:
        return []
    lines = ["| argument or option | default | meaning |", "|---|---|---|"]
    return [*lines, *("| " + " | ".join(_cell(c) for c in row) + " |" for row in rows), ""]


def _section(words: str, command: Any) -> list[str]:
    example, meaning = EXAMPLES[words]
    usage = ["```text", _usage(words, command), "```", ""]
    shown = [meaning, "", "```bash", example, "```", ""]
    return [f"## gspo {words}", "", command.help or "", "", *usage, *_table(command), *shown]


def make_page() -> str:
    """The whole page."""
    lines = [line for words, command in commands() for line in _section(words, command)]
    return INTRO + "\n" + "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with --check compare it."""
    page = make_page()
    if "--check" in sys.argv[1:]:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page
        if not current:
            print(f"{PAGE} is not current; run python scripts/make_command_docs.py", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
