"""`gspo doctor`: what a config computes, what it needs, whether it can work, and what has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gspo.checks.doctor.formula import formula_lines
from gspo.config import BatchPlan, ResolvedConfig, resolved_loss
from gspo.config.batch_plan import without_effect

GIB = 1 << 30
LOW_CLIP = 0.005
LOW_KEEP = 0.05


@dataclass
class Diagnosis:
    """The findings: `sections` of text, the same as `facts` for JSON, and `problems`."""

    facts: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, facts: Any, lines: Sequence[str], problems: Sequence[str] = ()) -> None:
        self.facts[name], self.sections[name] = facts, list(lines)
        self.problems += problems

    def text(self) -> str:
        """All sections, then the problems."""
        sections = {**self.sections, "problems" if self.problems else "no problems found": self.problems}
        return "".join(f"{name}\n" + "".join(f"  {line}\n" for line in lines) for name, lines in sections.items())


def examine_environment(diagnosis: Diagnosis) -> None:
    """Versions, device, memory, sandbox and engines."""
    from gspo.checks.doctor.machine import environment

    facts = environment()
    versions = {name: facts[name] for name in ("gspo", "python")} | facts["packages"]
    gpu = f", {facts['gpu_memory_bytes'] / GIB:.1f} GiB on the GPU" if "gpu_memory_bytes" in facts else ""
    vllm = f" (vllm is installed but cannot be used: {facts['vllm']})" if "vllm" in facts else ""
    optional = ", ".join(name for name, installed in facts["optional"].items() if installed) or "none"
    lines = [
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"device {facts['device']}, {facts['cpu_count']} cores, {facts['memory_bytes'] / GIB:.1f} GiB of memory{gpu}",
        f"rollout engines: {', '.join(facts['engines'])}{vllm}; optional packages: {optional}",
        f"sandbox level {facts['sandbox']['level']}: {facts['sandbox']['means']}",
    ]
    problems = []
    if facts["sandbox"]["level"] == 0:
        from gspo.sandbox import HOW_TO

        problems.append(f"no sandbox: the responses of code tasks cannot be executed here; {HOW_TO}")
    diagnosis.add("environment", facts, lines, problems)


def examine_config(diagnosis: Diagnosis, resolved: ResolvedConfig) -> None:
    """The objective as a formula, the batch plan, what has no effect, and warnings."""
    config = resolved.config
    formula = formula_lines(config)
    diagnosis.add("objective", formula, formula)
    plan = BatchPlan.of(config).lines()
    width = max(len(name) for name, _ in plan)
    diagnosis.add("batch plan", dict(plan), [f"{name:<{width}}  {value}" for name, value in plan])
    ineffective = [f"{p.key}: {p.message}" for p in resolved.warnings if p.message.startswith("has no effect")]
    no_effect = without_effect(config, ineffective)
    diagnosis.add("no effect", no_effect, no_effect)
    warnings = [str(w).replace("\n    ", "; ") for w in resolved.warnings if str(w.message) not in "".join(ineffective)]
    if warnings:
        diagnosis.add("warnings", warnings, warnings)


def as_run(diagnosis: Diagnosis, resolved: ResolvedConfig) -> ResolvedConfig:
    """The config with the sizes that a run would choose; what was adapted is a section of its own."""
    from gspo.build.sizes import adapt_sizes

    sizes = adapt_sizes(resolved)
    notes = [*sizes.notes, *sizes.warnings]
    if notes:
        diagnosis.add("adapted to the data and the machine", notes, notes)
    return sizes.resolved


def examine_template(diagnosis: Diagnosis, resolved: ResolvedConfig) -> None:
    """Whether messages can be appended with the model's chat template, for runs with an environment."""
    from gspo.build.environments import episode_settings
    from gspo.data.chat_append import append_problem
    from gspo.models.load import load_tokenizer
    from gspo.serving.agents.settings import AgentSettings

    config = resolved.config
    model, settings = config.actor_rollout_ref.model, episode_settings(config)
    if settings is None or isinstance(settings, AgentSettings):
        return
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    pool = settings.open_pool()
    try:
        settings = settings.with_tools(pool)
    finally:
        pool.close()
    found = settings.find_format(tokenizer)
    facts: dict[str, Any] = {
        "environment": settings.spec.title,
        "tools": [tool["function"]["name"] for tool in settings.tools],
        "format": None if found is None else found.name,
        "append_only": True,
    }
    lines = [f"{settings.spec.title}: tools {', '.join(facts['tools']) or 'none'}, format {facts['format'] or 'none'}"]
    problems = []
    if found is not None and found.inline:
        lines.append("tool answers are inline, so the chat template does not matter")
    else:
        role = "user" if found is None else "tool"
        problem = append_problem(tokenizer, role, **settings.prompt_options(tokenizer))
        facts["append_only"] = problem is None
        lines.append(f"messages of the role {role!r} can {'' if problem is None else 'not '}be appended")
        problems += [] if problem is None else [f"chat template: {problem}; use multi_turn.format=tag or python"]
    diagnosis.add("chat template", facts, lines, problems)


def examine_experience(diagnosis: Diagnosis, resolved: ResolvedConfig) -> None:
    """Settings outside what was seen to work on real models. They are no problems: other data may need them."""
    from gspo.build.device import choose_device
    from gspo.build.memory import model_size
    from gspo.checks.doctor.experience import departures

    config = resolved.config
    if found := list(departures(config, lambda: model_size(config, choose_device(config.trainer.device)).parameters)):
        diagnosis.add("outside what was seen to work", found, found)


def examine_memory(diagnosis: Diagnosis, resolved: ResolvedConfig) -> None:
    """The memory that the config needs, compared with what the machine has."""
    from gspo.build.device import choose_device
    from gspo.build.memory import in_words, machine_memory, num_held_out, plan_memory
    from gspo.checks.doctor.machine import base_memory
    from gspo.plan.constants import RESERVED

    config = resolved.config
    device = choose_device(config.trainer.device)
    base = int(RESERVED) if device.type == "cuda" else base_memory()
    plan = plan_memory(config, device, base=base, available=machine_memory(device), num_val=num_held_out(config))
    memory, stage = plan.memory, plan.memory.peak_stage
    limits = {name: f"  only in {', '.join(stages)}" for name, stages in memory.only.items()}
    rows = [(name, size, limits.get(name, "")) for name, size in memory.held.items()]
    rows.append(("program and libraries", plan.base, ""))
    rows.append((f"peak ({stage})", plan.peak, f" of {in_words(plan.available)}"))
    rows += [("optimiser, in host memory", memory.on_host, "")] if memory.on_host else []
    lines = [f"{name:<30} {in_words(size):>10}{more}" for name, size, more in rows]
    diagnosis.add("memory plan", plan.to_dict(), lines, [] if plan.fits else [plan.shortage()])


def examine_sample(diagnosis: Diagnosis, resolved: ResolvedConfig, **given: Any) -> None:
    """Keep rate, lengths, clip fraction, time per step and noise floor, from a quick sample with the real model."""
    from gspo.build.device import choose_device
    from gspo.checks.doctor.noise import noise_problems
    from gspo.checks.doctor.probe import probe
    from gspo.models.load import compute_dtype

    config = resolved.config
    actor = config.actor_rollout_ref.actor
    objective = resolved_loss(actor)
    seen = probe(config, **given)
    reward = "none" if seen.reward is None else f"{seen.reward:.3f}"
    lines = [
        f"{seen.num_groups} groups of {config.actor_rollout_ref.rollout.n} responses: {seen.keep_rate:.0%} would be kept, "
        f"in {seen.all_right:.0%} all responses are right; mean reward {reward}",
        f"responses have {seen.mean_length:.1f} tokens on average; {seen.cut:.0%} are cut at the limit",
        f"{seen.generated_tokens_per_s:,.0f} tokens per second generated, {seen.scored_tokens_per_s:,.0f} scored: "
        f"about {seen.step_seconds:.1f} s per step",
    ]
    problems = []
    if config.algorithm.filter_groups.enable and seen.keep_rate < LOW_KEEP:
        remedy = "use harder data" if seen.all_right > 0.5 else "warm up the model (gspo sft) or use easier data"
        problems.append(f"keep rate: in none of {seen.num_groups} sampled groups do the rewards differ; {remedy}")
    if seen.clip_fraction is not None:
        condition = "at this length, if the policy moves as far as in the GSPO paper"
        lines.append(f"expected clip fraction {seen.clip_fraction:.3f} {condition}")
        if seen.clip_fraction < LOW_CLIP and actor.clip_target is None:
            problems.append(
                f"clip range: ε = {objective.clip[0]:g}/{objective.clip[1]:g} will rarely clip responses of "
                f"{seen.mean_length:.0f} tokens; set actor.clip_target"
            )
    for noise in seen.noises:
        lines.append(
            f"noise floor, {noise.between}: {noise.token_rms:.1e} per token, {noise.sequence_rms:.1e} per sequence, "
            f"{noise.outside:.1%} outside the clip range"
        )
    dtype = compute_dtype(config.actor_rollout_ref.model.dtype, choose_device(config.trainer.device))
    problems += noise_problems(seen.noises, objective, dtype, actor.old_log_prob_source)
    diagnosis.add("quick sample", asdict(seen), lines, problems)
