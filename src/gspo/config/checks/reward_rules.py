"""Rules between the keys of rewards: entries that can be read, penalties with an effect, a judge that can be asked."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Callable, Iterator

from gspo.config.problems import Problem
from gspo.config.reward_parts import entry_problem, reward_parts
from gspo.config.schema import TrainerConfig
from gspo.config.schema.reward import JudgeConfig
from gspo.paths import user_path

JUDGE = "reward.judge"
OWN = "policy"  # the model that the run starts from
ROLLOUT = "actor_rollout_ref.rollout"
JUDGE_KEYS = tuple(f.name for f in dataclasses.fields(JudgeConfig) if f.name not in ("eval", "weight"))

Report = Callable[..., Problem]


def rewards(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Penalties must have an effect, functions must exist, and a reward model needs a path."""
    buffer = c.reward_model.reward_kwargs.overlong_buffer_cfg
    limit = c.reward_model.reward_kwargs.max_resp_len or c.data.max_response_length
    if buffer.enable and not 0 < buffer.len < limit:
        message = f"expected 1 to {limit - 1}: over so many tokens the penalty grows, up to the limit of {limit}"
        yield report("reward_model.reward_kwargs.overlong_buffer_cfg.len", message, f"e.g. {max(1, limit // 4)}")
    if buffer.enable and c.reward_model.reward_manager != "dapo":
        message = f"the {c.reward_model.reward_manager} manager applies no overlong penalty"
        yield report("reward_model.reward_manager", message, "set reward_model.reward_manager=dapo", "warning")
    yield from _entries(c, report)
    path = c.custom_reward_function.path
    if path is not None and path.endswith(".py") and not user_path(path).is_file():
        yield report(
            "custom_reward_function.path", "no such file", "give the path of a Python file, or the name of a module"
        )


def _entries(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """Entries of `reward.functions` have known keys, and at least one reward counts."""
    for entry in c.reward.functions:
        if message := entry_problem(entry, JUDGE_KEYS):
            yield report("reward.functions", message, "e.g. [{name: math, weight: 1}, {judge: {}, weight: 0.5}]")
            return
    yield from _model(c, report)
    parts = reward_parts(c)
    weights = [] if parts.model is None else [parts.model]
    weights += [part.weight for part in parts.judges] + [entry.get("weight", 1) for entry in parts.functions]
    if weights and not any(weights):
        yield report("reward.functions", "every weight is 0, so no response earns anything", "give one a weight")


def _model(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    parts, rollout = reward_parts(c), c.actor_rollout_ref.rollout
    if sum("model" in entry for entry in c.reward.functions) > 1:
        yield report("reward.functions", "two entries have a model; a run has one reward model", "remove one of them")
    if parts.model is not None and parts.model_path is None:
        yield report("reward_model.path", "the reward model has no path", "name its folder, or a hub name")
    ranks = c.actor_rollout_ref.actor.strategy == "fsdp2" or c.trainer.backend == "ray"
    if parts.model is not None and ranks and rollout.mode == "async" and rollout.max_head_offpolicyness > 0:
        message = f"its ranks train while {ROLLOUT}.mode = async generates, and cannot score at the same time"
        yield report("reward_model.enable", message, f"set {ROLLOUT}.mode=sync, or serve the model as a judge")


def judge(c: TrainerConfig, report: Report) -> Iterator[Problem]:
    """A judge needs an address and a model, and what its kind asks for."""
    if any(entry_problem(entry, JUDGE_KEYS) for entry in c.reward.functions):
        return
    for part in reward_parts(c).judges:
        one: JudgeConfig = dataclasses.replace(c.reward.judge, **part.replaced)
        yield from _address(one, report)
        yield from _kind(c, one, report)
        if part.replaced.get("base_url") == OWN:
            message = "a judge of its own cannot be the model that the run starts from"
            yield report("reward.functions", message, f"set {JUDGE}.base_url={OWN} and leave base_url out of the entry")
        if one.eval.model is None and one.eval.base_url is None and part.weight and c.trainer.test_freq > 0:
            message = (
                "the model that training pleases judges the held-out rows too, so their score may rise for nothing"
            )
            yield report(f"{JUDGE}.eval.model", message, "name another model", "warning")


def _address(one: JudgeConfig, report: Report) -> Iterator[Problem]:
    """The addresses of the judge and of that of held-out rows, and the variables with their keys."""
    if not one.base_url:
        yield report(f"{JUDGE}.base_url", "a judge has no address", f"e.g. {JUDGE}.base_url=http://127.0.0.1:8000/v1")
    if not one.model and one.base_url != OWN:
        yield report(f"{JUDGE}.model", "a judge needs the name of its model", f"e.g. {JUDGE}.model=Qwen/Qwen3-8B")
    held_out = one.eval.base_url
    for key, url in ((JUDGE, None if one.base_url == OWN else one.base_url), (f"{JUDGE}.eval", held_out)):
        if url and (problem := address_problem(url)) is not None:
            yield report(f"{key}.base_url", *problem)
    for key, variable in ((JUDGE, one.api_key_env), (f"{JUDGE}.eval", one.eval.api_key_env)):
        if not re.fullmatch(r"\w*", variable or ""):
            message = "expected the name of an environment variable, never the key itself"
            yield report(f"{key}.api_key_env", message, f"e.g. {key}.api_key_env=OPENAI_API_KEY")


def address_problem(url: str) -> tuple[str, str] | None:
    """What is wrong with the address of a server, and the remedy; None if nothing."""
    remedy = f"e.g. {JUDGE}.base_url=http://127.0.0.1:8000/v1"
    try:
        parts = urllib.parse.urlsplit(url)
        host, has_port = parts.hostname, parts.port != 0
    except ValueError as error:
        return f"is no address: {error}", remedy
    if "@" in parts.netloc or parts.query or parts.fragment:
        message = "expected http:// or https:// and a host, without a user name, password or query"
        return message, f"put the key into a variable and its name into {JUDGE}.api_key_env"
    if parts.scheme not in ("http", "https") or not host or not has_port or not re.fullmatch(r"[!-~]+", url):
        return "expected http:// or https:// and a host", remedy
    if parts.path.rstrip("/").endswith("/chat/completions"):
        return "the client adds /chat/completions itself", "leave it out"
    return None


def _kind(c: TrainerConfig, one: JudgeConfig, report: Report) -> Iterator[Problem]:
    if one.kind == "rubric" and one.rubric is None:
        yield report(f"{JUDGE}.rubric", "kind = rubric needs a file of criteria", f"e.g. {JUDGE}.rubric=rubric.toml")
    if one.kind == "rank" and c.actor_rollout_ref.rollout.n < 2:
        yield report(f"{JUDGE}.kind", f"rank needs groups of at least 2 responses, {ROLLOUT}.n is 1", "raise it")
    if one.kind == "rank" and one.prompt is not None:
        yield report(f"{JUDGE}.prompt", "a question of your own is about one response", "remove it, or change kind")
    if one.samples > 1 and one.temperature == 0:
        message = "the samples of a judge are equal without a temperature"
        yield report(f"{JUDGE}.temperature", message, f"e.g. {JUDGE}.temperature=0.7", "warning")
