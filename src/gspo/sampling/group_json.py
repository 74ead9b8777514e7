"""Groups and requests as plain JSON, exact to the bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.types import Group, Prompt, Reward, Rollout, Turn

FindPrompt = Callable[[str], Prompt]


def pack_group(group: Group) -> dict[str, Any]:
    """A finished group; its prompt is named by uid."""
    return {
        "uid": group.prompt.uid,
        "submission": group.submission,
        "version": group.version,
        "rollouts": [_pack_rollout(r) for r in group.rollouts],
        **({"failed": [_pack_rollout(r) for r in group.failed]} if group.failed else {}),
        **_pack_opening(group.prompt),
    }


def unpack_group(data: Mapping[str, Any], find: FindPrompt) -> Group:
    """The inverse of `pack_group`."""
    rollouts, failed = (tuple(map(_unpack_rollout, data.get(name, ()))) for name in ("rollouts", "failed"))
    return Group(_unpack_opening(data, find(data["uid"])), rollouts, data["submission"], data["version"], failed)


def pack_request(request: GroupRequest) -> dict[str, Any]:
    """An unfinished group with the tokens it has so far."""
    return {
        "uid": request.prompt.uid,
        "submission": request.submission,
        "version": request.version,
        "n": request.n,
        "partial": [_pack_rollout(r) for r in request.partial],
        **_pack_opening(request.prompt),
    }


def unpack_request(data: Mapping[str, Any], find: FindPrompt, params: SamplingParams, seed: int) -> GroupRequest:
    """The inverse of `pack_request`; sampling parameters and seed are the run's."""
    partial = tuple(_unpack_rollout(r) for r in data["partial"])
    return GroupRequest(
        prompt=_unpack_opening(data, find(data["uid"])),
        submission=data["submission"],
        n=data["n"],
        version=data["version"],
        params=params,
        seed=seed,
        partial=partial,
    )


def _pack_opening(prompt: Prompt) -> dict[str, Any]:
    """What an environment added to a prompt; {} when it added nothing, so that the uid says all."""
    if not prompt.opening:
        return {}
    return {"opening": [dict(message) for message in prompt.opening], "prompt_ids": list(prompt.token_ids)}


def _unpack_opening(data: Mapping[str, Any], prompt: Prompt) -> Prompt:
    if "opening" not in data:
        return prompt
    opening = tuple(data["opening"])
    return dataclasses.replace(
        prompt, messages=(*prompt.messages, *opening), token_ids=tuple(data["prompt_ids"]), opening=opening
    )


def _pack_rollout(rollout: Rollout) -> dict[str, Any]:
    # Masks and versions are long runs of equal numbers, so they are kept as (value, count).
    return {
        "token_ids": list(rollout.token_ids),
        "log_probs": [_pack_number(x) for x in rollout.log_probs],
        "loss_mask": _pack_runs(rollout.loss_mask),
        "versions": _pack_runs(rollout.versions),
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "reward": None if rollout.reward is None else _pack_reward(rollout.reward),
        "failure": rollout.failure,
        **({"turns": [_pack_turn(turn) for turn in rollout.turns]} if rollout.turns else {}),
        **({"context": list(rollout.context)} if rollout.context else {}),
        **({"branches": [_pack_rollout(branch) for branch in rollout.branches]} if rollout.branches else {}),
    }


def _unpack_rollout(data: Mapping[str, Any]) -> Rollout:
    return Rollout(
        token_ids=tuple(data["token_ids"]),
        log_probs=tuple(_unpack_number(x) for x in data["log_probs"]),
        loss_mask=_unpack_runs(data["loss_mask"]),
        versions=_unpack_runs(data["versions"]),
        finish_reason=data["finish_reason"],
        text=data["text"],
        reward=None if data["reward"] is None else _unpack_reward(data["reward"]),
        failure=data["failure"],
        turns=tuple(_unpack_turn(turn) for turn in data.get("turns", ())),
        context=tuple(data.get("context", ())),
        branches=tuple(_unpack_rollout(branch) for branch in data.get("branches", ())),
    )


def _pack_turn(turn: Turn) -> dict[str, Any]:
    packed = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn)}
    return packed | {
        "reward": None if turn.reward is None else _pack_number(turn.reward),
        "metrics": dict(turn.metrics),
    }


def _unpack_turn(data: Mapping[str, Any]) -> Turn:
    reward = data["reward"]
    return Turn(**{**data, "reward": None if reward is None else _unpack_number(reward)})


def _pack_reward(reward: Reward) -> dict[str, Any]:
    by_token = {"kl_by_token": [_pack_number(x) for x in reward.kl_by_token]} if reward.kl_by_token else {}
    return {
        "score": _pack_number(reward.score),
        "acc": None if reward.acc is None else _pack_number(reward.acc),
        "extra": {key: _pack_number(value) for key, value in reward.extra.items()},
        "kl_penalty": _pack_number(reward.kl_penalty),
        **by_token,
        **({"turns": [_pack_number(value) for value in reward.turns]} if reward.turns else {}),
        **({"noise": _pack_number(reward.noise)} if reward.noise else {}),
        **({"notes": dict(reward.notes)} if reward.notes else {}),
    }


def _unpack_reward(data: Mapping[str, Any]) -> Reward:
    return Reward(
        score=_unpack_number(data["score"]),
        acc=None if data["acc"] is None else _unpack_number(data["acc"]),
        extra={key: _unpack_number(value) for key, value in data["extra"].items()},
        kl_penalty=_unpack_number(data["kl_penalty"]),
        kl_by_token=tuple(_unpack_number(x) for x in data.get("kl_by_token", ())),
        turns=tuple(_unpack_number(value) for value in data.get("turns", ())),
        noise=_unpack_number(data.get("noise", 0.0)),
        notes=data.get("notes", {}),
    )


def _pack_number(value: float) -> float | str:
    """Finite numbers as they are (JSON keeps every bit of a double); the others, which JSON cannot represent, as text."""
    if isinstance(value, int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def _unpack_number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


def _pack_runs(values: tuple[int, ...]) -> list[list[int]]:
    return [[int(value), len(list(run))] for value, run in groupby(values)]


def _unpack_runs(runs: list[list[int]]) -> tuple[int, ...]:
    return tuple(value for value, count in runs for _ in range(count))
