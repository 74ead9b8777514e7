"""Write docs/configuration.md from the schema, the aliases and the tables of the config package.

`python scripts/make_config_docs.py` writes it; `--check` exits 1 when the file is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.algo.settings import LOSSES
from gspo.config import load
from gspo.config.compat.aliases import aliases, aliases_of
from gspo.config.compat.unneeded import UNNEEDED
from gspo.config.loading import tree
from gspo.config.loading.tree import Leaf
from gspo.config.text.explain import bounds_text
from gspo.config.text.show import scalar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRO = """# Configuration

<!-- Written by scripts/make_config_docs.py from the schema. Do not edit. -->

A run is described by one tree of keys, with verl's names. A value comes from, later ones winning:

1. the default in the tables below;
2. the recipe `embedded`, while `actor_rollout_ref.model.path` is `embedded` (the column *first run*);
3. a YAML file: `gspo train run.yaml`;
4. Python: `TrainerConfig(algorithm=AlgoConfig(...))`;
5. flags: `--group_size 4`, `--learning_rate=1e-6`, `--use_wandb`;
6. overrides: `data.train_batch_size=64`, `+reward_model.reward_kwargs.max_resp_len=512`.

`gspo config show` prints the result with the origin of each value, `gspo config show --diff` what differs from the
defaults, `gspo config explain KEY` one key, `gspo train --dry-run` the plan. Values may point at others with
`${data.train_batch_size}`. An ending that only one key has is enough: `clip_ratio_low=3e-4`; where the critic or the
reference has the same key, the policy's is meant.

Everything wrong with a configuration is reported at once, with the key, the value, where it came from and a remedy,
and the program ends with code 2 before any model is loaded. Keys that were set and can have no effect give a warning.
Batch sizes that nobody set give way to those that somebody did, and say so.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(leaf: Leaf, first_run: str) -> str:
    allowed = bounds_text(leaf)
    unit = f" ({leaf.info.unit})" if leaf.info.unit else ""
    other = ", ".join(f"`{a.name}`" for a in aliases_of(leaf.key) if a.name != leaf.key)
    meaning = f"{leaf.info.doc}{unit}{f' Allowed: {allowed}.' if allowed else ''}"
    cells = (
        f"`{leaf.key.rpartition('.')[2]}`",
        leaf.type_name,
        f"`{scalar(leaf.default)}`",
        first_run,
        meaning,
        other,
    )
    return "| " + " | ".join(_cell(c) for c in cells) + " |"


def _keys() -> list[str]:
    embedded = load()
    by_section: dict[str, list[str]] = {}
    for key, leaf in tree.leaves().items():
        from_recipe = embedded.origin(key).startswith("recipe")
        first_run = f"`{scalar(embedded.get(key))}`" if from_recipe else ""
        by_section.setdefault(key.rpartition(".")[0], []).append(_row(leaf, first_run))
    lines: list[str] = ["", "## Keys"]
    for section, rows in by_section.items():
        lines += ["", f"### {section}", "", tree.sections()[section].__doc__ or "", ""]
        lines += [
            "| key | type | default | first run | meaning | other names |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    return lines


def _losses() -> list[str]:
    lines = ["", "## What a loss uses where a key is null", ""]
    lines += ["| loss_mode | ratio level | clip_ratio_low / _high | loss_agg_mode |", "|---|---|---|---|"]
    for name, own in LOSSES.items():
        clip = f"{own.clip_low:g} / {own.clip_high:g}" if own.clips else "no clip"
        lines.append(f"| `{name}` | {own.levels[0]} | {clip} | {own.aggregation} |")
    return lines


def _other_systems() -> list[str]:
    lines = ["", "## Names of other systems", "", "Accepted in files, as flags and as overrides.", ""]
    lines += ["| name | from | key | meaning |", "|---|---|---|---|"]
    for alias in aliases().values():
        lines.append(
            _cell(f"`{alias.name}` § {alias.system} § `{alias.target}` § {alias.doc}").replace(" § ", " | ")
        )
    lines = [f"| {line} |" if line.startswith("`") else line for line in lines]
    lines += [
        "",
        "## Accepted without effect",
        "",
        "Keys of other systems that ask for nothing here; each gives a warning.",
        "",
    ]
    lines += ["| key | why |", "|---|---|", *(f"| `{key}` | {_cell(why)} |" for key, why in UNNEEDED.items())]
    return lines


def make_page() -> str:
    """The whole page."""
    return INTRO + "\n".join([*_keys(), *_losses(), *_other_systems()]) + "\n"


def main() -> int:
    """Write the page, or with --check compare it."""
    page = make_page()
    if "--check" in sys.argv[1:]:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page
        if not current:
            print(f"{PAGE} is not current; run python scripts/make_config_docs.py", file=sys.stderr)
        return 0 if current else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
