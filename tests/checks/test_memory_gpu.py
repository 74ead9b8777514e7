"""The memory plan of `gspo doctor` against what runs on a GPU reserve there."""

from __future__ import annotations

import pytest
import torch

from gspo.build.memory import plan_memory
from gspo.config import load
from tests.checks.test_doctor import measure_run, words_of
from tests.support.small_run import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
SHORT = ["data.max_response_length=128", "data.train_batch_size=16", "actor_rollout_ref.rollout.n=8"]
LONG = [
    "data.max_response_length=1000",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
]


@pytest.mark.parametrize(
    "more",
    [
        [*SHORT, "actor_rollout_ref.rollout.max_num_seqs=128"],
        [*LONG, "actor_rollout_ref.rollout.max_num_seqs=64"],
        [*SHORT, "actor_rollout_ref.rollout.max_num_seqs=128", "algorithm.adv_estimator=gae"],
    ],
)
def test_the_memory_plan_is_within_a_fifth_of_what_a_run_reserves(tmp_path, more):
    words = words_of(
        make_model(tmp_path / "model", **SHAPE),
        tmp_path,
        "trainer.device=cuda",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.val_after_train=false",
        *more,
    )
    available = torch.cuda.get_device_properties(0).total_memory
    plan = plan_memory(load(None, words).config, torch.device("cuda"), base=0, available=available, num_val=8)
    peak = measure_run(words)["reserved"]
    print(f"plan {plan.peak / 2**30:.2f} GiB, reserved {peak / 2**30:.2f} GiB: {plan.peak / peak:.2f}")
    assert abs(plan.peak - peak) < 0.2 * peak, (plan.to_dict(), peak)
