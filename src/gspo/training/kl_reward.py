"""KL against the reference as part of the reward: charged between scoring and filtering."""

from __future__ import annotations

import dataclasses
from typing import Any

from gspo.algo.kl import KLController, response_kl
from gspo.metrics import Metric, Metrics
from gspo.rewards.protocol import Scorer
from gspo.training.batch.batching import collate
from gspo.training.roles import PolicyRole, ReferenceRole
from gspo.types import Group, Reward, Rollout


class KlScorer:
    """A Scorer that fills in `Reward.kl_penalty` = β·Σ_t KL_t for every group that another one has scored.

    KL_t compares the policy as it is when the group is collected with the reference. Groups are measured one by one,
    so that what a response pays does not depend on which groups were collected with it. `observe` moves β once a step.
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

    def collect(self) -> list[Group]:
        return [self._charge(group) for group in self.inner.collect()]

    def close(self) -> None:
        self.inner.close()

    def _charge(self, group: Group) -> Group:
        scored = [r for r in group.rollouts if r.reward is not None]
        if not scored:
            return group
        batch = collate([group.with_rollouts(tuple(scored))])
        log_probs, _ = self._policy.log_probs(batch)
        by_response, total = response_kl(self._kind, log_probs, self._reference.log_probs(batch), batch.mask)
        charges = iter(by_response)
        self._sum += total
        self._num_tokens += int(batch.mask.sum())
        self._num_sequences += len(scored)
        return group.with_rollouts(
            tuple(r if r.reward is None else self._penalised(r, r.reward, next(charges)) for r in group.rollouts)
        )

    def _penalised(self, rollout: Rollout, reward: Reward, kl: float) -> Rollout:
        return rollout.with_reward(dataclasses.replace(reward, kl_penalty=self.controller.value * kl))

    def observe(self) -> Metrics:
        """End a step: the mean KL a token of all groups measured in it, and the β they paid; then β moves."""
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
