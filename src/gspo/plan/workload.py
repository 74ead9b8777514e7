"""The work of one training step: how many responses of which lengths, and what is done with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gspo.config import BatchPlan, TrainerConfig
from gspo.config.batch_plan import roles
from gspo.plan.constants import KEEP_RATE, LENGTH_SPREAD, MEAN_SHARE
from gspo.plan.lengths import Lengths

MAX_ROUNDS = 64


@dataclass(frozen=True)
class Workload:
    """The work of one step. `eta`: versions that rollouts may run ahead; `keep_rate`: share of groups that are kept."""

    prompts: int
    group_size: int
    mean_prompt: float  # tokens
    longest_prompt: int
    lengths: Lengths
    mini_batches: int = 1
    epochs: int = 1
    keep_rate: float = 1.0
    eta: int = 0
    max_staleness: int = 0  # without eta: versions that a group of a stream may be carried over
    in_flight: int | None = None  # of a stream: groups generated at once
    fills_slots: bool = False  # of a stream on a single GPU: a response that ends makes room for another at once
    keeps_cache: bool = False  # caches stay as they are when the weights change
    round_groups: int | None = None  # groups per round, where whole rounds are generated
    layout: str = "shared"  # shared | packed | plain
    score_share: float = 1.0  # share of the batch that is scored before the update
    reference: bool = False
    shares_reference: bool = False  # the reference is the policy without its adapters, not another model
    critic: bool = False
    token_budget: int = 16384
    micro_rows: int | None = None  # responses per micro-batch; None: as many as `token_budget` allows
    prefill_tokens: int = 8192
    slots: int = 1024  # responses that an engine generates at once, at most
    max_model_len: int | None = None  # tokens of a prompt with its response; None: the longest of both
    checkpointing: bool | None = None  # None: only where memory requires it
    eager: bool = False
    reshard: bool = True
    compiled: bool = True  # training, where it can be
    offload: bool = False  # a single rank keeps masters and moments in host memory
    eight_bit: bool = False  # moments in 8 bits
    four_bit: bool = False  # weights of the layers in 4 bits

    @property
    def rows(self) -> int:
        """Responses trained on."""
        return self.prompts * self.group_size

    @property
    def generated_groups(self) -> float:
        """Groups generated for one step: those that are not kept are replaced."""
        return self.prompts / self.keep_rate

    @property
    def groups_at_once(self) -> float:
        """Groups generated at once: eta batches while another is trained on, or what a synchronous step starts with."""
        if self.eta:
            return float(self.eta * self.prompts)
        return self.rounds[0] if self.in_flight is None else float(self.in_flight)

    @property
    def rounds(self) -> list[float]:
        """Sizes of the rounds of generation in a step, each waited for, where nothing is carried over.

        A stream replaces the groups that were not kept, so each round has what the last one left missing. With
        `round_groups` whole rounds are generated until there are enough groups.
        """
        if self.round_groups is not None:
            return [float(self.round_groups)] * math.ceil(self.generated_groups / self.round_groups - 1e-9)
        sizes = [float(self.prompts)]
        while sizes[-1] * (1 - self.keep_rate) >= 0.5 and len(sizes) < MAX_ROUNDS:
            sizes.append(sizes[-1] * (1 - self.keep_rate))
        return sizes

    @property
    def running_share(self) -> float:
        """Share of the responses of a group that are being generated, averaged over its generation."""
        return self.lengths.mean / self.lengths.longest_of(self.group_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.longest_prompt + self.lengths.longest

    @property
    def train_tokens(self) -> float:
        """Tokens of a forward over the whole batch."""
        if self.layout == "shared":
            return self.prompts * self.mean_prompt + self.rows * self.lengths.mean
        if self.layout == "packed":
            return self.rows * (self.mean_prompt + self.lengths.mean)
        return float(self.rows * self.longest)

    @property
    def train_pairs(self) -> float:
        """Pairs of tokens that attend to each other in that forward."""
        prompt, response = self.mean_prompt, 2 * self.lengths.mean * self.lengths.residual_mean  # of response: E[L²]
        if self.layout == "shared":
            own = self.prompts * prompt**2 / 2
            return own + self.rows * (prompt * self.lengths.mean + response / 2)
        if self.layout == "packed":
            return self.rows * (prompt**2 / 2 + prompt * self.lengths.mean + response / 2)
        return self.rows * self.longest**2 / 2

    @property
    def slot_tokens(self) -> int:
        """Tokens that a slot of an engine has room for."""
        return self.max_model_len or self.longest

    def largest_forward(self, ranks: int, *, packed: bool) -> LargestForward:
        """The largest training forward of a rank when all responses are as long as allowed.

        Without `packed` rows are counted as padded: attention that takes no packed rows pads its own copies of them.
        """
        layout = self.layout if packed else "plain"
        responses = max(1, math.ceil(self.rows / self.mini_batches / ranks))
        most = self._responses_at_once(responses, layout)
        tokens = self._tokens_of(most, layout)
        if self.micro_rows is None:  # only a single response may be over the budget
            tokens = max(min(tokens, self.token_budget), self._tokens_of(1, layout))
        return LargestForward(most, tokens, most >= responses)

    def _responses_at_once(self, responses: int, layout: str) -> float:
        """Responses in the largest micro-batch of `responses` responses."""
        if self.micro_rows is not None:
            return min(responses, self.micro_rows)
        budget, tokens = self.token_budget, self._tokens_of(responses, layout)
        if tokens <= budget:
            return responses
        if layout == "plain":
            return max(1, budget // self.longest)
        if not self.lengths.constant:
            return max(1.0, responses * budget / tokens)
        # Packed micro-batches are of even size, and a group that shares its prompt is divided only if it must be.
        unit = self.group_size if layout == "shared" and self._tokens_of(self.group_size, layout) <= budget else 1
        units, num = math.ceil(responses / unit), math.ceil(tokens / budget)
        while num < units and self._tokens_of(math.ceil(units / num) * unit, layout) > budget:
            num += 1
        return math.ceil(units / num) * unit

    def _tokens_of(self, responses: float, layout: str) -> float:
        """Tokens of a forward over `responses` of the longest responses, packed ones without their last token."""
        if layout == "plain":
            return responses * self.longest
        prompts = math.ceil(responses / self.group_size - 1e-9) if layout == "shared" else responses
        return prompts * self.longest_prompt + responses * (self.lengths.longest - 1)

    @property
    def targets(self) -> float:
        """Positions whose logits are computed."""
        return self.rows * (self.lengths.longest if self.layout == "plain" else self.lengths.mean)


@dataclass(frozen=True, slots=True)
class LargestForward:
    """The size of a training forward; `is_only`: it holds the whole mini-batch of a rank."""

    responses: float
    tokens: float
    is_only: bool


def workload_of(
    config: TrainerConfig,
    *,
    mean_response: float | None = None,
    spread: float | None = None,
    mean_prompt: float | None = None,
    keep_rate: float | None = None,
) -> Workload:
    """The work of a checked config. Mean lengths and the keep rate are not in a config: they are given or assumed."""
    plan, ar = BatchPlan.of(config), config.actor_rollout_ref
    actor, rollout = ar.actor, ar.rollout
    layout = "shared" if ar.model.use_shared_prefix else "packed" if ar.model.use_remove_padding else "plain"
    scored = {"recompute": 1.0, "rollout": 0.0, "first_pass": 1 - 1 / plan.num_mini_batches}
    wanted = roles(config)
    groups = config.algorithm.filter_groups
    carry = groups.max_staleness if groups.enable and groups.strategy == "stream" else 0
    longest, micro_rows = (
        plan.max_response_tokens,
        None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
    )
    mean = longest * MEAN_SHARE if mean_response is None else mean_response
    lengths = Lengths(mean, longest, LENGTH_SPREAD if spread is None else spread)
    in_flight = min(groups.max_in_flight or max(plan.generation_batch, plan.prompts), (carry + 1) * plan.prompts)
    return Workload(
        prompts=plan.prompts,
        group_size=plan.group_size,
        mean_prompt=plan.max_prompt_tokens if mean_prompt is None else mean_prompt,
        longest_prompt=plan.max_prompt_tokens,
        lengths=Lengths(float(longest), longest, 0.0) if rollout.ignore_eos else lengths,
        mini_batches=plan.num_mini_batches,
        epochs=plan.num_epochs,
        keep_rate=(keep_rate or KEEP_RATE) if groups.enable else 1.0,
        eta=rollout.max_head_offpolicyness if rollout.mode == "async" else 0,
        max_staleness=carry,
        in_flight=in_flight if groups.strategy == "stream" else None,
        fills_slots=groups.max_in_flight is None and rollout.name == "native",
        keeps_cache=rollout.keep_cache,
        round_groups=plan.generation_batch if groups.enable and groups.strategy == "rounds" else None,
        layout=layout,
        score_share=scored[actor.old_log_prob_source],
        reference=wanted["reference"],
        shares_reference=ar.model.lora_rank > 0 and ar.ref.path is None,
        critic=wanted["critic"],
        token_budget=micro_rows * (plan.max_prompt_tokens + longest) if micro_rows else actor.ppo_max_token_len_per_gpu,
        micro_rows=micro_rows,
        prefill_tokens=rollout.max_num_batched_tokens,
        slots=rollout.max_num_seqs,
        max_model_len=rollout.max_model_len,
        checkpointing=ar.model.enable_gradient_checkpointing or None,
        eager=rollout.enforce_eager,
        reshard=actor.fsdp_config.reshard_after_forward,
        compiled=actor.use_torch_compile and not ar.model.lora_rank and not config.trainer.deterministic,
        offload=actor.fsdp_config.optimizer_offload,
        eight_bit=actor.optim.eight_bit,
        four_bit=ar.model.load_in_4bit,
    )
