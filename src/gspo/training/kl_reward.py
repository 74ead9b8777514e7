"""KL to the reference as part of the reward, subtracted between scoring and filtering."""

from __future__ import annotations

import dataclasses
from typing import Any

from gspo.algo.kl import KLController, token_kl
from gspo.metrics import Metric, Metrics
from gspo.rewards.protocol import Scorer
from gspo.training.batch.batching import collate
from gspo.training.roles import PolicyRole, ReferenceRole
from gspo.types import Group


class KlScorer:
    """A Scorer that sets `Reward.kl_penalty` = β·Σ_t KL_t, and β·KL_t of each token, in groups that `inner` has scored.

    KL_t compares the current policy with the reference when a group is collected. Each group is computed alone, so that
    its penalty does not depend on other groups. `observe` updates β once per step.
    """

    def __init__(
        self, inner: Scorer, policy: PolicyRole, reference: ReferenceRole, controller: KLController, kind: str
    ) -> None:
        self.inner = inner
        self.controller = controller
        self._policy, self._reference, self._kind = policy, reference, kind
        self._sum, self._num_tokens, self._num_sequences = 0.0, 0, 0  # since the last step

    def submit(self, group: Group) -> None:
        self.inner.submit(group)

    def collect(self, num: int | None = None) -> list[Group]:
        return [self._with_penalty(group) for group in self.inner.collect(num)]

    def close(self) -> None:
        self.inner.close()

    def _with_penalty(self, group: Group) -> Group:
        scored = [r for r in group.rollouts if r.reward is not None]
        if not scored:
            return group
        batch = collate([group.with_rollouts(tuple(scored))])
        log_probs, _ = self._policy.log_probs(batch)
        kl_BT = token_kl(self._kind, log_probs, self._reference.log_probs(batch), batch.mask)
        self._sum += float(kl_BT.sum())
        self._num_tokens += int(batch.mask.sum())
        self._num_sequences += len(scored)
        kl = zip(kl_BT.sum(dim=-1).tolist(), (self.controller.value * kl_BT).tolist(), strict=True)
        rollouts = []
        for rollout in group.rollouts:
            if rollout.reward is not None:
                total, by_token = next(kl)
                by_token = tuple(by_token[: len(rollout.token_ids)])
                penalty = self.controller.value * total
                reward = dataclasses.replace(rollout.reward, kl_penalty=penalty, kl_by_token=by_token)
                rollout = rollout.with_reward(reward)
            rollouts.append(rollout)
        return group.with_rollouts(tuple(rollouts))

    def observe(self) -> Metrics:
        """End a step: its mean KL per token and its β as metrics; then update β."""
        metrics: Metrics = {"actor/reward_kl_penalty_coeff": Metric("last", self.controller.value)}
        if self._num_tokens:
            mean = self._sum / self._num_tokens
            metrics["actor/reward_kl_penalty"] = Metric("last", mean)
            self.controller.update(mean, self._num_sequences)
        self._sum, self._num_tokens, self._num_sequences = 0.0, 0, 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "controller": self.controller.state_dict(),
            "measured": [self._sum, self._num_tokens, self._num_sequences],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["controller"])
        self._sum, self._num_tokens, self._num_sequences = state["measured"]
