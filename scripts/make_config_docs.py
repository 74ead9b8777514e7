"""Write docs/configuration.md from the schema and the tables of the config package.

`python scripts/make_config_docs.py` writes it; `--check` exits 1 when the file is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gspo.algo.settings import LOSSES
from gspo.config import load
from gspo.config.compat.aliases import aliases, aliases_of
from gspo.config.compat.unneeded import FIXED, NO_EFFECT
from gspo.config.loading import tree
from gspo.config.loading.tree import Leaf
from gspo.config.text.explain import allowed_text
from gspo.config.text.show import scalar

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRO = """# Configuration

<!-- Written by scripts/make_config_docs.py from the schema. Do not edit. -->

A run is configured by one tree of keys, which have the names that verl uses. A value can come from several places.
Later ones in this list replace earlier ones:

1. the default in the tables below;
2. the recipe `embedded`, as long as `actor_rollout_ref.model.path` is `embedded` (column *embedded*);
3. a recipe that is named, `gspo train gsm8k`, or a YAML file: `gspo train run.yaml`;
4. Python: `TrainerConfig(algorithm=AlgoConfig(...))`;
5. flags: `--group_size 4`, `--learning_rate=1e-6`, `--use_wandb`;
6. overrides: `data.train_batch_size=64`, `+reward_model.reward_kwargs.max_resp_len=512`.

| command | prints |
|---|---|
| `gspo config show` | every key with its value and where the value comes from |
| `gspo config show --diff` | only the keys that differ from the defaults |
| `gspo config explain KEY` | the documentation of one key or section |
| `gspo train --dry-run` | what the run would compute, and which settings have no effect |

The last part of a key is enough where it is unambiguous: `clip_ratio_low=3e-4`. If the critic or the reference has the
same key, the short form means the policy's. A value may refer to another key: `${data.train_batch_size}`.

All errors in a configuration are reported at once, each with the key, the value, its origin and a remedy. The program
then ends with exit code 2, before any model is loaded. A key that was set but has no effect gives a warning. Batch sizes
that you do not set adapt to those that you do; their origin says so.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(leaf: Leaf, embedded: str) -> str:
    info, allowed = leaf.info, allowed_text(leaf)
    other = ", ".join(f"`{a.name}`" for a in aliases_of(leaf.key))
    meaning = info.doc
    meaning += f" Unit: {info.unit}." if info.unit else ""
    meaning += f" Allowed: {allowed}." if allowed else ""
    meaning += f" Example: `{info.example}`." if info.example else ""
    cells = (f"`{leaf.key.rpartition('.')[2]}`", leaf.type_name, f"`{scalar(leaf.default)}`", embedded, meaning, other)
    return "| " + " | ".join(_cell(c) for c in cells) + " |"


def _keys() -> list[str]:
    resolved = load()
    by_section: dict[str, list[str]] = {}
    for key, leaf in tree.leaves().items():
        from_recipe = resolved.origin(key).startswith("recipe")
        embedded = f"`{scalar(resolved.get(key))}`" if from_recipe else ""
        by_section.setdefault(key.rpartition(".")[0], []).append(_row(leaf, embedded))
    lines: list[str] = ["", "## Keys"]
    for section, rows in by_section.items():
        lines += ["", f"### {section}", "", tree.sections()[section].__doc__ or "", ""]
        lines += ["| key | type | default | embedded | meaning | other names |", "|---|---|---|---|---|---|", *rows]
    return lines


def _losses() -> list[str]:
    lines = ["", "## Defaults of the losses", "", "A loss uses these values where the key is null.", ""]
    lines += ["| loss_mode | ratio level | clip_ratio_low / _high | loss_agg_mode |", "|---|---|---|---|"]
    for name, own in LOSSES.items():
        clip = f"{own.clip_low:g} / {own.clip_high:g}" if own.clips else "no clip"
        lines.append(f"| `{name}` | {own.levels[0]} | {clip} | {own.aggregation} |")
    return lines


def _other_systems() -> list[str]:
    lines = ["", "## Names of other systems", "", "These are accepted in files, as flags and as overrides."]
    lines += ["*Standalone scripts* are those in `recipes/standalone`.", ""]
    lines += ["| name | system | key | difference |", "|---|---|---|---|"]
    for alias in aliases().values():
        lines.append(f"| `{alias.name}` | {alias.system} | `{alias.target}` | {_cell(alias.doc)} |")
    lines += ["", "## Keys without effect", "", "These keys of other systems are accepted with a warning.", ""]
    lines += ["| key | why |", "|---|---|", *(f"| `{key}` | {_cell(why)} |" for key, why in NO_EFFECT.items())]
    lines += [
        "",
        "## Keys with fixed values",
        "",
        "These keys of other systems may be null or have these values only.",
        "",
    ]
    lines += ["| key | values | what to do about others |", "|---|---|---|"]
    for key, fixed in FIXED.items():
        lines.append(f"| `{key}` | {', '.join(f'`{v}`' for v in fixed.values)} | {_cell(fixed.remedy)} |")
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
