"""The plan of a run as text: objective, sizes, models, and what has no effect."""

from __future__ import annotations

from collections.abc import Sequence

from gspo.config.batch_plan import BatchPlan, roles, without_effect
from gspo.config.loading.resolve import ResolvedConfig
from gspo.config.resolved_loss import resolved_loss


def dry_run_text(resolved: ResolvedConfig, memory: str = "", adapted: Sequence[str] = ()) -> str:
    """What `gspo train --dry-run` prints: `memory` in words, and sentences about sizes that were `adapted`."""
    config = resolved.config
    model, algorithm = config.actor_rollout_ref.model, config.algorithm
    objective = resolved_loss(config.actor_rollout_ref.actor)
    groups = algorithm.filter_groups
    kept = (
        f"keeps the groups that {groups.function} accepts"
        if groups.function
        else f"keeps groups whose responses differ in {groups.metric}"
    )
    sampling = f"{groups.strategy}: {kept}" if groups.enable else "off"
    files = config.data.train_files
    lines = [
        ("model", model.path + (f", LoRA rank {model.lora_rank}" if model.lora_rank else "")),
        ("data", ", ".join(files) if isinstance(files, list) else files),
        ("objective", f"{objective}, {objective.aggregation}"),
        ("advantages", algorithm.adv_estimator),
        ("dynamic sampling", sampling),
        ("other models", ", ".join(r for r, on in roles(config).items() if on) or "none"),
        *BatchPlan.of(config).lines(),
        *([("memory", memory)] if memory else []),
    ]
    width = max(len(name) for name, _ in lines)
    text = ["plan"] + [f"  {name:<{width}}  {value}" for name, value in lines]
    if adapted:
        text += ["adapted to the data and the machine"] + [f"  {line}" for line in adapted]
    ineffective = [f"{p.key}: {p.message}" for p in resolved.warnings if p.message.startswith("has no effect")]
    text += ["no effect"] + [f"  {line}" for line in without_effect(config, ineffective)]
    return "\n".join(text) + "\n"
