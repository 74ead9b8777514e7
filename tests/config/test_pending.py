"""Every key is read by the program, or is listed as waiting for a capability."""

from __future__ import annotations

import pytest

from gspo.config import load
from gspo.config.loading import tree
from gspo.config.pending import _ESSENTIAL, PENDING, PENDING_VALUES, essential
from tests.config.reading import attributes_by_file, is_generic, is_read


def test_the_reader_finds_the_files_that_read_the_config():
    assert any(path.name == "build.py" for path in attributes_by_file())
    assert is_read("data.train_batch_size") and not is_read("actor_rollout_ref.actor.no_such_key")


@pytest.mark.parametrize("key", tree.leaves())
def test_every_key_is_read_or_pending(key):
    assert is_read(key) or key in PENDING, (
        f"{key} is read nowhere: read it, or list it in gspo/config/pending.py"
    )


@pytest.mark.parametrize("key", PENDING)
def test_a_pending_key_exists_and_is_not_read_yet(key):
    assert key in tree.leaves()
    assert is_generic(key) or not is_read(key), f"{key} is read now: remove it from gspo/config/pending.py"


def test_pending_values_are_allowed_values():
    for (key, value), _ in PENDING_VALUES.items():
        choices = tree.leaves()[key].info.choices
        assert value in choices if choices else isinstance(value, bool)
    assert set(_ESSENTIAL) <= set(PENDING)


def test_setting_a_pending_key_warns_and_an_essential_one_stops_training():
    if not PENDING_VALUES:
        pytest.skip("nothing is pending")
    (key, value), capability = next(iter(PENDING_VALUES.items()))
    resolved = load(overrides=[f"{key}={value}"])
    assert any(w.key == key and capability in w.message for w in resolved.warnings)
    assert [p.key for p in essential(resolved.warnings)] == [key]
    assert not essential(load().warnings)
