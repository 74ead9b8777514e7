"""The fingerprint of a run: what must not change, besides the config, for a resumed run to compute the same bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from gspo.checkpoint.resume import ResumeRefused
from gspo.config import TrainerConfig
from gspo.data.examples import Example, ExampleOrder
from gspo.training.roles import PolicyFacts
from gspo.types import Prompt

RANKS = "trainer ranks"
TRAINED_ON = "trained on"
SCHEDULE = "steps of the learning-rate schedule"
DATA = "training data"
ARITHMETIC = (RANKS, "threads", "device")
EARLIER = {TRAINED_ON: "rollouts"}  # of checkpoints without the key


def fingerprint(
    config: TrainerConfig,
    facts: PolicyFacts,
    rows: Sequence[Any],
    total_steps: int,
    trained_on: Literal["rollouts", "answers", "pairs"] = "rollouts",
) -> dict[str, Any]:
    """The model, the data (as JSON values) and the machine's arithmetic, in words or digests that can be compared."""
    optim = config.actor_rollout_ref.actor.optim
    return {
        TRAINED_ON: trained_on,
        "model shape": _digest(facts.shapes),
        "weights that stay as they are (LoRA's base, the reference)": facts.frozen_digest,
        RANKS: facts.num_ranks,
        DATA: _digest(rows),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        SCHEDULE: None if optim.lr_scheduler_type == "constant" else total_steps,
    }


def prompt_rows(prompts: Sequence[Prompt]) -> list[Any]:
    """What identifies prompts as training data."""
    return [(p.uid, p.token_ids, str(p.ground_truth)) for p in prompts]


def example_rows(order: ExampleOrder[Example] | None) -> list[Any]:
    """What identifies examples as training data."""
    examples = [] if order is None else order.examples
    return [(e.prompt.uid, e.prompt.token_ids, e.answer_ids) for e in examples]


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Refuse to resume when the model, the data or the machine's arithmetic differs. Returns notes for the user.

    Another number of ranks adds up in another order, so values that only affect the last bits are not compared then. A
    branch has no facts about its parent's data and schedule. The length of a schedule may change: from then on every
    step has the learning rate of a run that was planned with the new length.
    """
    length, now = saved.get(SCHEDULE), current[SCHEDULE]
    notes = []
    if length is not None and now is not None and length != now:
        notes.append(
            f"the learning-rate schedule ends at step {now}, not {length}: from here on every step has the rate of a run "
            f"of {now} steps"
        )
    saved = {SCHEDULE: now, DATA: current[DATA]} | EARLIER | dict(saved) | {SCHEDULE: now}
    other_ranks = saved.get(RANKS) != current[RANKS]
    lines = [
        f"  {key}: {saved.get(key)!r} in the checkpoint, {now!r} now"
        for key, now in current.items()
        if saved.get(key) != now and not (other_ranks and key in ARITHMETIC)
    ]
    if lines:
        raise ResumeRefused("the checkpoint cannot be resumed to the bit here:\n" + "\n".join(lines))
    return notes


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
