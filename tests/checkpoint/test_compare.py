"""Which keys may differ between a checkpoint and the run that resumes it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.resume import Resume, ResumeRefused, refuse_differences
from gspo.config import load
from gspo.config.loading import tree
from gspo.runs.folder import RunFolder
from tests.support import small_checkpoint


@pytest.mark.parametrize(
    ("key", "free"),
    [
        ("trainer.total_training_steps", True),
        ("trainer.on_alarm", True),
        ("trainer.backend", True),
        ("trainer.callbacks", True),
        ("actor_rollout_ref.rollout.num_workers", True),
        ("actor_rollout_ref.actor.strategy", True),
        ("actor_rollout_ref.ref.fsdp_config.fsdp_size", True),
        ("reward.timeout", True),
        ("trainer.seed", False),
        ("trainer.device", False),
        ("trainer.critic_warmup", False),
        ("reward.format_weight", False),
        ("actor_rollout_ref.actor.optim.total_training_steps", False),
        ("actor_rollout_ref.model.override_config.rope_theta", False),
        ("no.such.key", False),
    ],
)
def test_keys_that_do_not_affect_results_may_change(key, free):
    def nested(value):
        for part in reversed(key.split(".")):
            value = {part: value}
        return value

    with contextlib.nullcontext() if free else pytest.raises(ResumeRefused, match=rf"{key}: 1 in the checkpoint, 2"):
        refuse_differences(nested(1), nested(2), Path("here"))


COMPUTATION = ("data.", "algorithm.", "custom_reward_function.", "reward_model.", "critic.", "actor_rollout_ref.model.")
ACTOR_FREE = ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.fsdp_config.")


def test_every_key_of_the_computation_is_compared():
    """Data, reward, model, loss and optimisers; where shards are placed may change."""
    placement = {"reward_model.offload"}
    keys = [key for key in tree.leaves() if key.startswith(COMPUTATION) and ".fsdp_config." not in key]
    keys = [key for key in keys if key not in placement]
    keys += [k for k in tree.leaves() if k.startswith("actor_rollout_ref.actor.") and not k.startswith(ACTOR_FREE)]
    assert len(keys) > 100
    for key in keys:
        with pytest.raises(ResumeRefused, match=rf"  {key}: .* in the checkpoint, 'another' now"):
            refuse_differences({}, {key: "another"}, Path("here"))


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.override_config.rope_theta", "no.such.key"])
def test_a_key_that_stands_on_one_side_only_is_a_difference(key):
    with pytest.raises(ResumeRefused, match=rf"{key}: 1 in the checkpoint, 'unset' now"):
        refuse_differences({key: 1}, {}, Path("here"))
    with pytest.raises(ResumeRefused, match=rf"{key}: 'unset' in the checkpoint, 2 now"):
        refuse_differences({}, {key: 2}, Path("here"))
    refuse_differences({key: 1}, {key: 1}, Path("here"))


def test_a_key_that_is_newer_than_the_checkpoint_had_its_default():
    saved = load(overrides=["trainer.seed=3"]).to_dict()
    now = load(overrides=["trainer.seed=3"]).to_dict()
    del saved["algorithm"]["filter_groups"]["function"]
    del saved["actor_rollout_ref"]["model"]["override_config"]
    refuse_differences(saved, now, Path("here"))
    now["algorithm"]["filter_groups"]["function"] = "mine:keep"
    with pytest.raises(ResumeRefused, match=r"filter_groups\.function: None in the checkpoint, 'mine:keep' now"):
        refuse_differences(saved, now, Path("here"))


def test_an_older_checkpoint_takes_the_place_of_a_bad_one_unless_the_user_named_it(tmp_path):
    for step in (1, 2, 4):
        small_checkpoint.save(tmp_path / "checkpoints", step)
    run, newest = RunFolder(tmp_path), checkpoint.load(tmp_path / "checkpoints" / "step-000004")
    assert Resume(run, load()).older(newest, ValueError("bad")).step == 2
    with pytest.raises(checkpoint.CheckpointError, match="bad"):
        Resume(run, load(), chosen=True).older(newest, ValueError("bad"))
    oldest = checkpoint.load(tmp_path / "checkpoints" / "step-000001")
    with pytest.raises(checkpoint.CheckpointError, match="bad"):
        Resume(run, load()).older(oldest, ValueError("bad"))
