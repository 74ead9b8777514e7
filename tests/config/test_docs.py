"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gspo.config.compat.aliases import aliases
from gspo.config.compat.unneeded import NO_EFFECT, why_unneeded
from gspo.config.loading import tree

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_config_docs.py"


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("make_config_docs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(docs):
    assert docs.PAGE.read_text(encoding="utf-8") == docs.make_page(), "run: python scripts/make_config_docs.py"


def test_every_key_and_alias_is_on_the_page(docs):
    page = docs.make_page()
    assert all(f"### {section}\n" in page for section in {k.rpartition(".")[0] for k in tree.leaves()})
    assert all(f"| `{name}` |" in page for name in aliases())


@pytest.mark.parametrize("key", tree.leaves())
def test_every_key_documents_itself_and_its_default_is_allowed(key):
    leaf = tree.leaves()[key]
    assert leaf.info.doc.endswith(".") and leaf.info.doc[0] != " "
    assert leaf.info.violation(leaf.default) is None


def test_no_name_has_two_meanings():
    assert not set(aliases()) & set(tree.leaves())
    assert not set(NO_EFFECT) & (set(tree.leaves()) | set(aliases()))
    assert all(alias.target in tree.leaves() for alias in aliases().values())
    assert why_unneeded("hydra.run.dir") and why_unneeded("data.shuffle") is None


@pytest.mark.parametrize(
    ("key", "type_name", "choices", "is_open"),
    [
        ("actor_rollout_ref.actor.strategy", "str", ("local", "fsdp2"), False),
        ("actor_rollout_ref.model.attn_implementation", "str or null", ("sdpa", "eager", "flex_attention"), False),
        ("trainer.logger", "list of str", ("console", "tensorboard", "wandb", "trackio"), True),
        ("trainer.save_freq", "int or str", (), False),
    ],
)
def test_the_choices_of_a_key_are_those_of_its_type(key, type_name, choices, is_open):
    leaf = tree.leaves()[key]
    assert (leaf.type_name, leaf.info.choices, leaf.info.open) == (type_name, choices, is_open)
