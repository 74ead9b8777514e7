"""The run card `RUN.md`: a model card with data, reward, config, seeds, result, cost, environment and how to repeat it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from gspo.report import words
from gspo.report.verdict import LOSS_NAMES, judge, start_and_end
from gspo.runs.metric_names import CORE, held_out_source
from gspo.runs.run import Run

ACTOR = "actor_rollout_ref.actor"
PAIR_FIGURES = {  # of a reward model
    "val/accuracy": "share in the right order",
    "val/sign_accuracy": "share of answers on the right side of 0",
    "val/loss": "loss",
}
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")


def run_card(run: Run) -> str:
    """Markdown with the front matter that model hubs read."""
    parts = [
        _front_matter(run),
        f"# {_escape(run.name)}",
        _verdict(run),
        _section("Result", _result(run)),
        _section("Training", _table(_training(run))),
        _section("Settings that differ from the defaults", _settings(run)),
        _section("Cost", _table(_cost(run))),
        _section("Environment", _table(_environment(run))),
        _section("Reproduce", _reproduce(run)),
        _section("Limits", _limits(run)),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _front_matter(run: Run) -> str:
    model = run.setting("actor_rollout_ref.model.path")
    data = None if run.given("train_dataset") else run.setting("data.train_files")
    kind = "supervised-fine-tuning" if run.is_supervised else "reinforcement-learning"
    task, kind = ("text-classification", "reward-model") if run.is_reward_model else ("text-generation", kind)
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", "- gspo", f"- {kind}"]
    if isinstance(model, str) and _is_hub_name(model):
        lines.append(f"base_model: {model}")
    sets = [d for d in (data if isinstance(data, list) else [data]) if isinstance(d, str) and _is_hub_name(d)]
    if sets:
        lines += ["datasets:", *(f"- {d}" for d in sets)]
    return "\n".join([*lines, "---"])


def _is_hub_name(name: str) -> bool:
    """`owner/name`, as opposed to a path or a built-in task."""
    is_path = name.endswith(DATA_SUFFIXES) or Path(name).exists()
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not is_path


def _verdict(run: Run) -> str:
    verdict = judge(run)
    return "\n\n".join([f"**{_escape(verdict.headline)}.**", *(_escape(s) for s in verdict.sentences)])


def _result(run: Run) -> str:
    ends, losses = start_and_end(run), run.values("val/loss")
    if run.is_reward_model:
        found = [(title, run.values(name)) for name, title in PAIR_FIGURES.items()]
        rows = [[title, f"{values[0]:.4f}", f"{values[-1]:.4f}"] for title, values in found if values]
        return _grid(["held-out pairs", "start", "end"], rows) if rows else "No held-out pairs."
    if ends is None and len(losses) >= 2:
        rows = [["start", f"{losses[0]:.4f}"], ["end", f"{losses[-1]:.4f}"]]
        return _grid(["held-out loss per answer token", "value"], rows)
    if ends is None:
        return "No held-out evaluation at both ends."
    rows = []
    for title, value, at in (("start", ends[0], "start"), ("end", ends[1], "final")):
        ci = run.interval(at)
        rows.append([title, words.percent(value), words.interval(*ci) if ci else "unknown"])
    if c := run.change:
        interval = f"{100 * c.low:+.1f} to {100 * c.high:+.1f}"
        rows.append(["change, same questions", words.points(c.difference), interval])
    return _grid(["held-out accuracy", "value", "95 % interval"], rows)


def _training(run: Run) -> list[tuple[str, Any]]:
    s = run.setting
    if run.is_supervised:
        data = run.given("train_dataset") or words.name_of(s("data.train_files"))
        return [
            ("base model", s("actor_rollout_ref.model.path")),
            ("training data", f"{'pairs' if run.is_reward_model else 'answers'} of {data}"),
            ("held-out data", run.given("val_dataset") or _held_out(run)),
            ("steps", run.last_step),
            (f"{'pairs' if run.is_reward_model else 'examples'} per step", s("data.train_batch_size")),
            ("learning rate", s(f"{ACTOR}.optim.lr")),
            ("seed", s("trainer.seed")),
        ]
    loss = s(f"{ACTOR}.policy_loss.loss_mode")
    return [
        ("base model", s("actor_rollout_ref.model.path")),
        ("training data", run.given("train_dataset") or words.name_of(s("data.train_files"))),
        ("held-out data", run.given("val_dataset") or _held_out(run)),
        ("reward", _reward(run)),
        ("loss", LOSS_NAMES.get(str(loss), loss)),
        ("advantage", s("algorithm.adv_estimator")),
        ("dynamic sampling", {True: "on", False: "off"}.get(s("algorithm.filter_groups.enable"))),
        ("steps", run.last_step),
        ("groups per step", s("data.train_batch_size")),
        ("responses per group", s("actor_rollout_ref.rollout.n")),
        ("groups per mini-batch", s(f"{ACTOR}.ppo_mini_batch_size")),
        ("learning rate", s(f"{ACTOR}.optim.lr")),
        ("seed", s("trainer.seed")),
        ("seed of the data order", s("data.seed")),
    ]


def _reward(run: Run) -> str:
    """What a response is rewarded by, in words."""
    s, functions = run.setting, run.setting("reward.functions")
    entries = [e for e in functions if isinstance(e, dict)] if isinstance(functions, list) else []
    named = [_place(e["name"], e.get("path")) for e in entries if "name" in e and "judge" not in e]
    custom = s("custom_reward_function.path")
    if given := run.given("reward_fn"):
        named = [given]
    elif not named and custom:
        named = [_place(s("custom_reward_function.name"), custom)]
    judged = s("reward.judge.base_url") is not None or any("judge" in e for e in entries)
    models = [e["model"] for e in entries if "model" in e] or ([{}] if s("reward_model.enable") is True else [])
    path = models[0] if models and isinstance(models[0], str) else s("reward_model.path")
    environment = s("environment.name") or s("environment.path") or s("environment.agent")
    parts = [f"the environment {words.name_of(environment)}"] if environment else []
    parts += [*named, *([f"the judge {words.name_of(s('reward.judge.model'))}"] if judged else [])]
    parts += [f"the reward model {words.name_of(path)}"] if models else []
    return ", ".join(parts) or "built in, by data source"


def _place(name: Any, path: Any) -> str:
    """A function by its name, and its file where it has one."""
    return words.portable(f"{path}:{name}") if path else str(name)


def _held_out(run: Run) -> str:
    """The held-out data in words."""
    files, split = run.setting("data.val_files"), run.setting("data.val_split")
    if not files and isinstance(split, float):
        return f"{split:.3g} of the questions in the training data"
    return words.name_of(files or "the task's own held-out split")


def _settings(run: Run) -> str:
    changed = [c for c in run.config if c["origin"] and c["origin"] != "default"]
    if not changed:
        return ""
    rows = []
    for c in changed:
        value = json.dumps(words.portable(c["value"]), ensure_ascii=False, default=str)
        origin = " ".join(words.portable(word) for word in str(c["origin"]).split(" "))
        rows.append([f"`{c['key']}`", f"`{value}`", origin])
    return _grid(["key", "value", "origin"], rows)


def _cost(run: Run) -> list[tuple[str, Any]]:
    generated, wasted = run.generated_tokens, run.total("train/wasted_tokens")
    unused = f"{wasted:,.0f} ({words.percent(wasted / generated)})" if wasted is not None and generated else None
    return [
        ("wall-clock time", words.duration(run.seconds) if run.seconds is not None else None),
        ("device", (run.environment or {}).get("device")),
        ("generated tokens", f"{generated:,.0f}" if generated else None),
        ("of those in groups never trained on", unused),
    ]


def _environment(run: Run) -> list[tuple[str, Any]]:
    facts = run.environment or {}
    packages = facts.get("packages")
    names = ("gspo", "git", "python", "platform", "cpu_count", "threads", "num_gpus", "cuda")
    plain = [(name.replace("_", " "), facts.get(name)) for name in names]
    return plain + (sorted(packages.items()) if isinstance(packages, dict) else [])


def _reproduce(run: Run) -> str:
    argv = (run.environment or {}).get("argv")
    lines = [
        "The run folder's `config.yaml` contains every value that was used:",
        "```",
        f"gspo {'rm' if run.is_reward_model else 'sft' if run.is_supervised else 'train'} config.yaml",
        "```",
    ]
    if isinstance(argv, list) and argv:
        command = shlex.join(["gspo", *(words.portable(str(a)) for a in argv[1:])])
        lines += ["It was started with:", "```", command.replace("```", ""), "```"]
    return "\n".join(lines)


def _limits(run: Run) -> str:
    names = [name for name in run.names() if name.startswith(CORE)]
    sources = sorted({source for name in names if (source := held_out_source(name)) is not None})
    if run.is_reward_model:
        return (
            "Measured on held-out pairs only. How well its scores serve as a reward is known after training with them."
        )
    if not sources and run.values("val/loss"):
        return "Only the loss of held-out answers was measured; what the model answers by itself was not."
    if not sources:
        return "The model was not evaluated on held-out questions; its abilities are unknown."
    return (
        f"Measured on held-out questions of {', '.join(sources)} only. "
        "A reward that a program can check says nothing about other abilities or about safety."
    )


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _table(rows: list[tuple[str, Any]]) -> str:
    shown = [[k, str(words.portable(v))] for k, v in rows if v is not None and v != ""]
    return _grid(["", ""], shown) if shown else ""


def _grid(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows])


def _escape(text: str) -> str:
    """The text without characters that would end its table cell or act as markup."""
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
