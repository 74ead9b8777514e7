"""Groups and requests as JSON text and back: the same to the bit, whatever numbers and texts they hold."""

from __future__ import annotations

import json
import math
import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.sampling.group_json import pack_group, pack_request, unpack_group, unpack_request
from gspo.types import Group, Prompt, Reward, Rollout, Turn

PROMPT = Prompt("a/1", (), (1, 2))
PARAMS = SamplingParams(max_tokens=9, temperature=0.5)
floats = st.floats(width=64)
rewards = st.none() | st.builds(
    Reward,
    floats,
    acc=st.none() | floats,
    extra=st.dictionaries(st.text(max_size=4), floats, max_size=3),
    kl_penalty=floats,
    kl_by_token=st.lists(floats, max_size=2).map(tuple),
    turns=st.lists(floats, max_size=2).map(tuple),
    noise=floats,
    notes=st.just({}) | st.just({"judge": {"verdict": "right", "reason": "so", "tokens": 3}}),
)
turns = st.builds(
    Turn,
    st.integers(0, 3),
    st.integers(0, 6),
    reward=st.none() | floats,
    num_calls=st.integers(0, 2),
    num_errors=st.integers(0, 2),
    num_cut=st.integers(0, 2),
    metrics=st.just({}) | st.just({"depth": 2.5}),
    malformed=st.booleans(),
    observation=st.text(max_size=3),
    truncated=st.booleans(),
)


@st.composite
def rollouts(draw: st.DrawFn, with_branches: bool = True) -> Rollout:
    size = draw(st.integers(0, 6))
    of = lambda strategy: tuple(draw(st.lists(strategy, min_size=size, max_size=size)))  # noqa: E731
    return Rollout(
        token_ids=of(st.integers(0, 2**31)),
        log_probs=of(st.floats(width=32)),
        loss_mask=of(st.integers(0, 1)),
        versions=of(st.integers(0, 3)),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=10)),
        reward=draw(rewards),
        failure=draw(st.none() | st.text(max_size=5)),
        turns=tuple(draw(st.lists(turns, max_size=2))),
        context=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        branches=tuple(draw(st.lists(rollouts(with_branches=False), max_size=2))) if with_branches else (),
    )


def bits(value: object) -> object:
    """The value with every float as its bytes, so that NaN equals itself and 0 differs from -0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    if isinstance(value, Rollout | Reward | Turn | Group | GroupRequest):
        return {name: bits(getattr(value, name)) for name in value.__slots__}
    return value


@settings(max_examples=25)
@given(st.lists(rollouts(), max_size=3), st.lists(rollouts(), max_size=2), st.integers(0, 10**9), st.integers(0, 10**6))
@example(
    [Rollout((5,), (-0.0,), (1,), (0,), "stop", reward=Reward(float("nan"), extra={"x": float("-inf")}))], [], 0, 0
)
def test_a_group_comes_back_to_the_bit(of: list[Rollout], failed: list[Rollout], submission: int, version: int):
    group = Group(PROMPT, tuple(of), submission, version, tuple(failed))
    text = json.dumps(pack_group(group), allow_nan=False)
    assert bits(unpack_group(json.loads(text), {PROMPT.uid: PROMPT}.__getitem__)) == bits(group)


@settings(max_examples=25)
@given(st.lists(rollouts(), max_size=3), st.integers(0, 10**9), st.integers(1, 9))
def test_a_request_comes_back_with_what_it_has_so_far(of: list[Rollout], submission: int, n: int):
    request = GroupRequest(PROMPT, submission, n, 4, PARAMS, seed=11, partial=tuple(of))
    text = json.dumps(pack_request(request), allow_nan=False)
    assert bits(unpack_request(json.loads(text), {PROMPT.uid: PROMPT}.__getitem__, PARAMS, 11)) == bits(request)
