"""A key that a table, a message or a page of ours names is a key that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gspo
from gspo.config import load
from gspo.config.checks import ineffective
from gspo.config.compat.aliases import aliases
from gspo.config.compat.unneeded import NO_EFFECT, fixed_values, why_unneeded
from gspo.config.loading import names, tree
from gspo.config.loading.sources import RECIPE, Layer, read_yaml

SOURCE = Path(gspo.__file__).parent
ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
RECIPES = [RECIPE, *sorted((ROOT / "recipes").rglob("*.yaml"))]
# The tables of other systems name keys of theirs; `test_aliases` and `test_foreign_keys` test those.
MODULES = [p for p in sorted(SOURCE.rglob("*.py")) if "compat" not in p.parts]
KNOWN = {*tree.leaves(), *tree.sections()}
SECTIONS = {part for key in tree.leaves() for part in key.split(".")[:-1]}
DOTTED = re.compile(rf"(?<![\w./{{-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_0-9*]+)+(?![\w(/])")
ANYTHING = "*"  # a part of a text that is known only when the program runs
NO_KEYS = (
    "reward_model.ground_truth",  # a column of verl's data
    "model.safetensors",
    "model.safetensors.index.json",
    "data.md",
    "environment.json",
    "trainer.parts.engine",  # an attribute in Python
    "actor_rollout_ref.rollout.engine_kwargs.vllm",  # verl's prefix of keys that are read one by one
)


def exists(name: str) -> bool:
    """Whether a name, in full or by its last parts, is a key or section of ours or a name that we accept for one."""
    if ANYTHING in name:
        pattern = re.compile(r"(?:.*\.)?" + re.escape(name).replace(re.escape(ANYTHING), r"[a-z_0-9]+"))
        return tree.leaf_of(name) is not None or any(pattern.fullmatch(k) for k in (*KNOWN, *aliases()))
    accepted = name in aliases() or why_unneeded(name) is not None or fixed_values(name) is not None
    return accepted or name in KNOWN or any(key.endswith(f".{name}") for key in KNOWN)


def missing_keys(text: str) -> set[str]:
    """Names in a text that look like keys and do not exist."""
    found = {match.rstrip(".") for match in DOTTED.findall(text)}
    return {name for name in found if name not in NO_KEYS and not exists(name)}


def texts(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string of a module, with the module's own constants filled in."""
    constants: dict[str, str] = {}
    for node in module.body:
        is_text = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr)
        if is_text and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = text_of(node.value, constants)
    parts = {id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(module):
        is_text = isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in parts
        if is_text and isinstance(getattr(node, "value", ""), str):
            yield node.lineno, text_of(node, constants)


def text_of(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return constants.get(node.value.id, ANYTHING)
    return ANYTHING


def test_the_search_finds_names_that_are_no_keys():
    module = ast.parse('A = "algorithm.filter_groups"\nB = (f"{A}.order", f"{A}.enable", f"set {A}.{x}_no")')
    assert {name for _, text in texts(module) for name in missing_keys(text)} == {
        "algorithm.filter_groups.order",
        "algorithm.filter_groups.*_no",
    }
    assert missing_keys("see `actor.shufle` and rollout.n, actor.strategy=fsdp2.") == {"actor.shufle"}


def test_modules_name_keys_that_exist():
    wrong = [
        f"{path}:{line}: {', '.join(missing)}"
        for path in MODULES
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if (missing := missing_keys(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_pages_name_keys_that_exist():
    wrong = [
        f"{path}:{number}: {', '.join(missing)}"
        for path in PAGES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (missing := missing_keys(line))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_a_recipe_sets_keys_that_exist(path):
    problems = []
    entries = read_yaml(path, Layer.RECIPE, problems)
    assert entries and not problems
    for entry in entries:
        known = names.canonical(entry.name) or entry.name in aliases()
        assert known or (path != RECIPE and entry.name in NO_EFFECT), entry.name


def test_rules_about_keys_without_effect_name_keys_that_exist():
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    combinations = (
        (),
        (f"{rollout}.name=package.module:engine", f"{rollout}.mode=async", "trainer.total_training_steps=3"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.strategy=rounds", "adv_estimator=rloo"),
        (f"{actor}.policy_loss.loss_mode=sapo", f"{actor}.ppo_micro_batch_size_per_gpu=1", "trainer.device=cpu"),
        ("adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=1"),
        (f"{actor}.clip_ratio_low=1e-3", f"{actor}.clip_ratio_high=1e-3", f"{actor}.ppo_mini_batch_size=1024"),
        (f"{actor}.optim.lr_warmup_steps=1", "data.shuffle=false", "reward.functions=[{name: math}]"),
        (f"{rollout}.keep_cache=true", "data.val_files=arithmetic", "data.val_split=0.1"),
        (f"{rollout}.multi_turn.enable=false", "environment.name=guess"),
        (
            *(f"{rollout}.multi_turn.function_tool_path=tools.py", f"{actor}.policy_loss.loss_mode=gspo_token"),
            "algorithm.turn_rewards=return_to_go",
        ),
        ("reward.judge.base_url=http://host/v1", "reward.judge.model=m", "reward.functions=[{judge: {}}]"),
        ("adv_estimator=opd", "actor_rollout_ref.ref.path=org/teacher", f"{actor}.sft_weight=0"),
    )
    found = {
        rule
        for overrides in combinations
        for rule in ineffective.rules(load(overrides=["actor_rollout_ref.model.path=org/model", *overrides]).config)
    }
    calls = [node for node in ast.walk(ast.parse(Path(ineffective.__file__).read_text())) if isinstance(node, ast.Call)]
    written = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "unused"]
    assert len({reason for reason, _, _ in found}) == len(written), "a rule holds for none of the combinations"
    for name in {key for _, _, keys in found for key in keys}:
        assert name in tree.leaves() or (name.endswith(".") and name[:-1] in tree.sections()), name


def test_an_alias_sets_keys_that_exist():
    given = (True, "true", 1, "grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "group", "none", "auto", "off")
    for alias in aliases().values():
        assert alias.target in tree.leaves()
        for value in given:
            try:
                found = alias.apply(value)
            except ValueError:  # not a value of this alias
                continue
            assert set(found) <= set(tree.leaves()), alias.name
