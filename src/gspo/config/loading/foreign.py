"""Settings of other systems that act only together with another one, or inside a mapping of ours."""

from __future__ import annotations

from typing import Any

from gspo.config.loading.settings import Setting
from gspo.config.problems import Problem

ARGUMENTS = "actor_rollout_ref.rollout.engine_kwargs"
OTHER_ENGINES = ("sglang", "trtllm")
LORA = ("actor.lora_rank", "actor.lora_alpha", "actor.target_modules")


def prepare(settings: list[Setting], problems: list[Problem]) -> list[Setting]:
    """The settings without those that another one switches off, which are reported; vLLM's arguments under our key."""
    settings = _lora_of_areal(_resume_path(settings, problems), problems)
    # AReaL's leave-one-out refines the estimator that its mean level chooses, wherever it is written.
    settings = sorted(settings, key=lambda setting: setting.name.endswith("mean_leave1out"))
    return [own for setting in settings if (own := _engine_argument(setting, problems)) is not None]


def _resume_path(settings: list[Setting], problems: list[Problem]) -> list[Setting]:
    """verl's path to resume from acts with trainer.resume_mode=resume_path, or where that key is not set."""
    modes = [s.value for s in settings if s.name == "trainer.resume_mode"]
    if not modes or modes[-1] == "resume_path":
        return settings
    for setting in settings:
        if setting.name == "trainer.resume_from_path" and setting.value not in (None, False, ""):
            _without_effect(setting, f"trainer.resume_mode is {modes[-1]}, not resume_path", problems)
    return [s for s in settings if s.name != "trainer.resume_from_path"]


def _lora_of_areal(settings: list[Setting], problems: list[Problem]) -> list[Setting]:
    """AReaL's keys of LoRA act unless actor.use_lora is false."""
    switches = [s.value for s in settings if s.name == "actor.use_lora"]
    if not switches or switches[-1] is not False:
        return settings
    for setting in settings:
        if setting.name in LORA:
            _without_effect(setting, "actor.use_lora is false", problems)
    return [s for s in settings if s.name not in LORA]


def _engine_argument(setting: Setting, problems: list[Problem]) -> Setting | None:
    """verl keeps arguments by engine: those of vLLM become ours, those of other engines have no effect."""
    if setting.name == ARGUMENTS and isinstance(setting.value, dict):
        return _engine_mapping(setting, problems)
    if not setting.name.startswith(f"{ARGUMENTS}."):
        return setting
    engine, _, argument = setting.name.removeprefix(f"{ARGUMENTS}.").partition(".")
    if engine in OTHER_ENGINES:
        _without_effect(setting, f"{engine} does not generate", problems)
        return None
    if engine == "vllm":
        name = f"{ARGUMENTS}.{argument}" if argument else ARGUMENTS
        return Setting(name, setting.value, setting.origin, setting.text)
    return setting


def _engine_mapping(setting: Setting, problems: list[Problem]) -> Setting:
    found: dict[str, Any] = {}
    for name, value in setting.value.items():
        if name in OTHER_ENGINES:
            _without_effect(
                Setting(f"{ARGUMENTS}.{name}", value, setting.origin), f"{name} does not generate", problems
            )
        else:
            found |= value or {} if name == "vllm" else {name: value}
    return setting if found == setting.value else Setting(ARGUMENTS, found, setting.origin)


def _without_effect(setting: Setting, reason: str, problems: list[Problem]) -> None:
    problems.append(setting.problem(f"has no effect: {reason}", "remove it", "warning"))
