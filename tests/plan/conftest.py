"""Small workloads and shapes whose costs can be worked out by hand."""

from __future__ import annotations

import pytest

from gspo.models.shape import SHAPES, ModelShape
from gspo.plan.constants import DEVICES
from gspo.plan.lengths import Lengths
from gspo.plan.split import Split
from gspo.plan.workload import Workload


def ranks(count: int, *, shard: int | None = None, checkpointing: bool = False) -> Split:
    """`count` ranks that train and generate, in one shard group unless `shard` is given."""
    return Split(count, count, False, 1, shard or count, checkpointing)


@pytest.fixture
def h200():
    return DEVICES["h200"]


@pytest.fixture
def shape() -> ModelShape:
    """Two layers of width 8 with one head of 8: 8·8·4 + 3·8·16 + 2·8 = 656 a layer, 8 the last norm, 10·8 the embedding."""
    return ModelShape("hand", layers=2, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8, vocab=10, tied=True)


@pytest.fixture
def seven() -> ModelShape:
    return SHAPES["7b"]


@pytest.fixture
def work() -> Workload:
    """64 prompts of 8 responses, 128 tokens and responses around 700 of at most 2,048."""
    return Workload(64, 8, 128.0, 128, Lengths(700.0, 2048, 0.8), mini_batches=4, score_share=0.75, slots=512, eta=2)
