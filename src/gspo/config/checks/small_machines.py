"""Rules of keys for small machines: weights in 4 bits, optimiser state in 8, and Apple's MPS."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gspo.config.batch_plan import roles
from gspo.config.problems import Problem
from gspo.config.schema import TrainerConfig

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
FOUR_BIT, EIGHT_BIT = f"{MODEL}.load_in_4bit", "optim.eight_bit"
Report = Callable[..., Problem]


def quantised(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Weights in 4 bits are frozen; bitsandbytes works in one process, and not on MPS."""
    actor, model = c.actor_rollout_ref.actor, c.actor_rollout_ref.model
    sections = {ACTOR: actor.optim.eight_bit, "critic": c.critic.optim.eight_bit}
    keys = [f"{section}.{EIGHT_BIT}" for section, is_set in sections.items() if is_set]
    if model.load_in_4bit:
        keys.append(FOUR_BIT)
        if model.lora_rank == 0:
            yield report(FOUR_BIT, "weights in 4 bits cannot be trained", f"set {MODEL}.lora_rank, e.g. to 16")
    for key in keys:
        if actor.strategy == "fsdp2":
            yield report(key, f"{ACTOR}.strategy = fsdp2 cannot shard it", f"set {ACTOR}.strategy=local, or remove it")
        if c.trainer.device == "mps":
            yield report(key, "bitsandbytes has no kernels for MPS", "set trainer.device=cpu, or remove it")
    for section, offloads in ((ACTOR, actor.fsdp_config), ("critic", c.critic.fsdp_config)):
        if sections[section] and offloads.optimizer_offload:
            key, message = f"{section}.fsdp_config.optimizer_offload", "state in 8 bits stays on the device"
            yield report(key, message, f"remove it, or {section}.{EIGHT_BIT}")


def mps(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """What torch does not do on MPS: collectives, float64 tensors, and the engines and layouts written for CUDA."""
    if c.trainer.device != "mps":
        return
    remedy = "set trainer.device=cpu, or remove it"
    if c.actor_rollout_ref.actor.strategy == "fsdp2" or c.trainer.backend == "ray":
        yield report("trainer.device", "MPS is one device of one process", "use actor.strategy=local and backend=local")
    if c.actor_rollout_ref.rollout.name == "vllm":
        yield report("actor_rollout_ref.rollout.name", "vLLM does not run on MPS", "set it to native")
    if c.algorithm.use_kl_in_reward:
        yield report("algorithm.use_kl_in_reward", "is computed in float64, which MPS does not have", remedy)
    if roles(c)["critic"]:
        yield report("algorithm.adv_estimator", "a critic's loss is float64, which MPS does not have", remedy)
