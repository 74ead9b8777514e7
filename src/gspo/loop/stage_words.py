"""The stages of a step in words, for a person who watches the run."""

from __future__ import annotations

WORDS = {
    "gen": "generating",
    "data": "reading the batch",
    "old_log_prob": "scoring with the policy",
    "ref": "scoring with the reference",
    "values": "scoring with the critic",
    "baseline": "generating the greedy baseline",
    "adv": "computing advantages",
    "update_critic": "training the critic",
    "update_actor": "training",
    "update_weights": "giving the new weights to the engine",
    "testing": "evaluating",
    "save_checkpoint": "saving",
    "log_groups": "writing the groups",
}
COMPILING = ("gen", "testing", "update_actor")  # the first time, where compilation is on


def stage_text(stage: str, step: int, total_steps: int | None, *, is_first: bool) -> str:
    """What a stage does; `step` is the number of finished steps, `is_first`: nothing has run in this process before."""
    number = step if stage == "testing" else step + 1
    total = f"/{total_steps}" if total_steps else ""
    first = " (the first time may compile)" if is_first and stage in COMPILING else ""
    return f"step {number}{total}: {WORDS.get(stage, stage)}{first}"
