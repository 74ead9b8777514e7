"""Which groups carry a gradient: the keep rule of dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gspo.registry import PluginError, Registry, user_code
from gspo.types import Group, Reward

Reason = Literal["kept", "all_right", "all_wrong", "same_score", "filtered", "reward_failed"]
GroupFilter = Callable[[Group], bool]
GROUP_FILTERS: Registry[GroupFilter] = Registry("algorithm.filter_groups.function")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a group is kept, and why. `group` has only the rollouts with a reward."""

    keep: bool
    reason: Reason
    group: Group


def metric_value(reward: Reward, metric: str) -> float:
    """The number a group is filtered on; a ValueError that lists the choices when the reward has no such number."""
    if metric in ("seq_reward", "score"):
        return reward.score
    if metric == "seq_final_reward":
        return reward.final
    value = reward.acc if metric == "acc" else reward.extra.get(metric)
    if value is None:
        known = ["seq_reward", "seq_final_reward", "score"]
        known += ["acc"] if reward.acc is not None else []
        known += sorted(set(reward.extra) - set(known))
        raise ValueError(
            f"filter_groups.metric={metric!r}: the reward function does not return it; expected one of "
            f"{', '.join(known)}. Choose one of these, or return {metric!r} from the reward function."
        )
    return value


def group_filter(name: str) -> Callable[[GroupFilter], GroupFilter]:
    """Register a function `Group -> bool` (keep it?) under a name for `algorithm.filter_groups.function`."""
    return GROUP_FILTERS.register(name)


def judge(
    group: Group,
    metric: str = "seq_reward",
    *,
    enable: bool = True,
    keep: GroupFilter | None = None,
    min_spread: float = 0.0,
) -> Verdict:
    """Keep a group iff its metric differs within it, or it has a single response; `keep` replaces this rule.

    Its greatest and smallest value must differ by more than `min_spread` and, where it is the reward, by more than
    repeated scores of one response do (`Reward.noise`, the mean over the group).

    Rollouts without a reward are set apart first. A group of several with fewer than two left is dropped, since it has
    no advantage to compute. With `enable=False` only that rule applies. The metric is compared with `max != min`,
    because the standard deviation of equal numbers need not be zero in floating point.
    """
    scored = tuple(r for r in group.rollouts if r.reward is not None)
    failed = tuple(r for r in group.rollouts if r.reward is None)
    rest = dataclasses.replace(group, rollouts=scored, failed=failed) if failed else group
    compared = metric if enable and keep is None else "seq_reward"
    values = [_finite(r.reward, compared, group) for r in scored if r.reward]
    num_rollouts = len(group.rollouts)
    if len(values) < min(2, num_rollouts):
        return Verdict(False, "reward_failed", rest)
    if enable and keep is not None:
        return Verdict(True, "kept", rest) if _ask(keep, rest) else Verdict(False, "filtered", rest)
    if not enable or num_rollouts == 1 or (max(values) != min(values) and differs(rest, metric, min_spread)):
        return Verdict(True, "kept", rest)
    reason = _why_equal(rest, values[0]) if max(values) == min(values) else "same_score"
    return Verdict(False, reason, rest)


def differs(group: Group, metric: str, min_spread: float) -> bool:
    """Whether the metric differs within the group by more than its noise."""
    rewards = [r.reward for r in group.rollouts if r.reward]
    values = [metric_value(reward, metric) for reward in rewards]
    noise = 0.0
    if metric in ("seq_reward", "score", "seq_final_reward"):
        noise = sum(reward.noise for reward in rewards) / len(rewards)
    return max(values) - min(values) > max(min_spread, noise)


def is_right(reward: Reward) -> bool:
    """Whether a response counts as a success: by its accuracy, else by a positive score."""
    return reward.score > 0 if reward.acc is None else reward.acc >= 0.5


def _ask(keep: GroupFilter, group: Group) -> bool:
    """Whether the user's filter keeps a group. A scalar bool of torch or numpy is a bool too."""
    what = f"algorithm.filter_groups.function: prompt {group.prompt.uid!r}: {getattr(keep, '__name__', keep)}"
    with user_code(what):
        answer: Any = keep(group)
        answer = answer.item() if hasattr(answer, "item") else answer
    if not isinstance(answer, bool):
        raise PluginError(f"{what} returned {answer!r}; expected True or False")
    return answer


def _finite(reward: Reward, metric: str, group: Group) -> float:
    value = metric_value(reward, metric)
    if not math.isfinite(value):
        raise ValueError(
            f"prompt {group.prompt.uid!r} (submission {group.submission}): the reward function returned {metric}={value}; "
            "expected a finite number. Return None for a reward that cannot be computed: it is then left out and counted."
        )
    return value


def _why_equal(group: Group, value: float) -> Reason:
    """Why a group has equal metrics: by accuracy where there is one, else 1 and above is right, 0 and below wrong."""
    accs = [r.reward.acc for r in group.rollouts if r.reward]
    right = [value if acc is None else acc for acc in accs]
    if min(right) >= 1:
        return "all_right"
    if max(right) <= 0:
        return "all_wrong"
    return "same_score"
