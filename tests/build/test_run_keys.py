"""Keys of the engine, the tokenizer, rewards by file, filters, loggers and what is measured: what each changes."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time

import pytest
import torch
from rich.console import Console as RichConsole

from gspo.build import models, run
from gspo.build.data.training_data import load_prompts
from gspo.build.device import DeviceError
from gspo.build.engines import engine_spec, native_options
from gspo.build.models import build_roles
from gspo.build.rewards import build_scorer
from gspo.build.role_settings import policy_settings, reference_settings
from gspo.build.run import load_run_tokenizer, prepare_process
from gspo.build.settings import sampling_settings
from gspo.config import TrainerConfig, load
from gspo.data.rows import DataError
from gspo.loop import training_run
from gspo.loop.guards.watchdog import FILE, Watchdog
from gspo.loop.trainer import Trainer
from gspo.models.load import load_tokenizer
from gspo.report.live import summary
from gspo.runs.run import read_run
from gspo.sampling.errors import SamplingError
from gspo.training.optim.eight_bit import EightBitOptimizer
from gspo.types import Group, Prompt, Rollout
from tests.support.small_run import config as small_config
from tests.support.small_run import even_first_byte, make_model

ACTOR, MODEL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
ROLLOUT, FILTER = "actor_rollout_ref.rollout", "algorithm.filter_groups"
CPU = torch.device("cpu")


def config(*overrides: str) -> TrainerConfig:
    return load(None, [f"{MODEL}.path=some/model", *overrides]).config


def test_the_native_engine_has_its_keys():
    words = ("max_num_batched_tokens=99", "gpu_memory_utilization=0.3", "enforce_eager=true", "free_cache_engine=false")
    assert native_options(config(*(f"{ROLLOUT}.{word}" for word in words))) == {
        "prefill_tokens": 99,
        "memory_utilization": 0.3,
        "eager": True,
        "free_cache": False,
        "keep_cache": False,
    }
    assert native_options(config())["free_cache"] is True
    kept = native_options(config(f"{ROLLOUT}.keep_cache=true"))
    assert (kept["keep_cache"], kept["free_cache"]) == (True, False)


def test_a_worker_is_told_the_model_its_tokenizer_and_its_sizes(tmp_path, model):
    other = make_model(tmp_path / "other", seed=1)
    words = (f"{ROLLOUT}.max_num_seqs=7", f"{ROLLOUT}.max_model_len=40", f"{MODEL}.trust_remote_code=true")
    more = (f"{MODEL}.tokenizer_path={other}", f"{MODEL}.attn_implementation=eager", "trainer.plugins=[mine.py]")
    c = small_config(tmp_path, model, *words, *more, f"{MODEL}.override_config={{rope_theta: 5.0}}").config
    spec = engine_spec(c, load_tokenizer(str(model)), CPU)
    assert (spec.model, spec.tokenizer, spec.trust_remote_code) == (str(model), str(other), True)
    assert (spec.num_slots, spec.max_length) == (7, 40)
    assert (spec.attn_implementation, spec.plugins) == ("eager", ("mine.py",))
    assert spec.override_config == {"rope_theta": 5.0}


def test_the_tokenizer_may_be_another_and_its_template_has_options(tmp_path, model):
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if short %}={% else %}=+{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    c = small_config(tmp_path, model, f"{MODEL}.tokenizer_path={tmp_path / 'tokenizer'}").config
    found = load_run_tokenizer(c)
    own = load_run_tokenizer(small_config(tmp_path, model).config)
    assert found.chat_template == tokenizer.chat_template != own.chat_template
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "arithmetic", "ground_truth": "2"}
    short = small_config(tmp_path, model, "data.apply_chat_template_kwargs={short: true}").config
    texts = [found.decode(load_prompts(one, found, "train", [row])[0].token_ids) for one in (c, short)]
    assert texts == ["1+1=+", "1+1="]
    with pytest.raises(DataError, match="max_prompt_length=3"):
        load_prompts(small_config(tmp_path, model, "data.max_prompt_length=3").config, found, "train", [row])


def test_log_probs_are_scored_by_tokens_or_rows_as_asked():
    rows, budget = "log_prob_micro_batch_size_per_gpu=3", "log_prob_max_token_len_per_gpu=700"
    kl, fixed, dynamic = (
        f"{ACTOR}.use_kl_loss=true",
        "log_prob_use_dynamic_bsz=false",
        "log_prob_use_dynamic_bsz=true",
    )
    for word, wanted in ((fixed, (None, 3)), (dynamic, (700, None))):
        c = config(kl, *(f"{part}.{one}" for part in (ROLLOUT, REF) for one in (rows, budget, word)))
        own = policy_settings(c)
        assert (own.score_tokens, own.score_rows) == wanted
        cut = reference_settings(c, own)
        assert (cut.micro_batch_tokens, cut.micro_batch_rows) == (wanted[0], wanted[1] or own.micro_batch_rows)


def test_large_layers_are_compiled_unless_that_is_off(tmp_path, model, monkeypatch):
    seen, real = [], models.Policy

    def policy(module, optimizer, schedule, settings, ranks):
        seen.append(settings)
        return real(module, optimizer, schedule, dataclasses.replace(settings, compiled=False), ranks)

    monkeypatch.setattr(models, "worth_compiling", lambda module: True)
    monkeypatch.setattr(models, "Policy", policy)
    for word in ("true", "false"):
        build_roles(small_config(tmp_path, model, f"{ACTOR}.use_torch_compile={word}").config, CPU, total_steps=1)
    assert [settings.compiled for settings in seen] == [True, False]


def test_each_optimiser_has_8_bits_by_its_own_key(tmp_path, model):
    pytest.importorskip("bitsandbytes")
    for section, kinds in ((ACTOR, (True, False)), ("critic", (False, True))):
        c = small_config(tmp_path, model, "algorithm.adv_estimator=gae", f"{section}.optim.eight_bit=true").config
        roles = build_roles(c, CPU, total_steps=1)
        assert roles.critic is not None
        assert tuple(isinstance(r.optimizer, EightBitOptimizer) for r in (roles.policy, roles.critic)) == kinds


def test_a_custom_reward_gets_its_arguments(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n    return bonus\n"
    )
    words = (f"custom_reward_function.path={path}", "custom_reward_function.name=grade")
    c = config(*words, "custom_reward_function.reward_kwargs={bonus: 0.75}", "reward.num_workers=1")
    scorer = build_scorer(c)
    try:
        prompt = Prompt("p", ({"role": "user", "content": "?"},), (1,), data_source="mine", ground_truth="4")
        scorer.submit(Group(prompt, (Rollout((5,), (-1.0,), (1,), (0,), "stop", text="4"),), 0, 0))
        (group,) = scorer.collect()
    finally:
        scorer.close()
    assert group.rollouts[0].reward is not None and group.rollouts[0].reward.score == 0.75


def test_failures_are_counted_by_the_environment_where_there_is_one():
    rates = ("reward.max_failure_rate=0.4", "environment.max_failure_rate=0.6")
    assert sampling_settings(config(*rates)).max_failure_rate == 0.4
    assert sampling_settings(config(*rates, "environment.name=guess")).max_failure_rate == 0.6


def test_a_run_is_built_with_the_kind_of_kl_and_the_filter_of_its_keys(tmp_path, model, monkeypatch):
    (tmp_path / "filters_of_a_test.py").write_text("def keep_none(group):\n    return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=mse", "data.train_batch_size=2")
    limit = (f"{FILTER}.function=filters_of_a_test:keep_none", f"{FILTER}.max_num_gen_batches=1")
    c = small_config(tmp_path, model, *words, *limit).config
    kinds, real = [], run.KlScorer
    monkeypatch.setattr(run, "KlScorer", lambda *args: kinds.append(args[-1]) or real(*args))
    parts = run.build(c)
    try:
        assert kinds == ["mse"]
        with pytest.raises(SamplingError, match="2 filtered"):
            parts.sampler.next_batch()
    finally:
        parts.close()
        sys.modules.pop("filters_of_a_test", None)


def test_a_run_on_ray_has_its_backend():
    backend = pytest.importorskip("gspo.distributed.ray.backend", reason="Ray is not installed")
    assert isinstance(run.choose_backend(config("trainer.backend=ray")), backend.RayBackend)
    assert run.choose_backend(config()) is None


def test_only_deterministic_operations_are_allowed_when_asked_for():
    before = torch.get_num_threads()
    try:
        assert (
            prepare_process(config("trainer.deterministic=true", "trainer.device=cpu", "trainer.num_threads=3")) == CPU
        )
        assert torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 3
        with pytest.raises(DeviceError, match=r"trainer\.device=cuda:64"):
            prepare_process(config("trainer.device=cuda:64"))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


STEPS = """
from gspo.loop.callbacks import Callback

class Steps(Callback):
    seen = []

    def on_step_end(self, trainer, step, metrics):
        self.seen.append(step)
"""


def test_a_run_logs_watches_imitates_measures_and_shows_by_its_keys(tmp_path, model, monkeypatch):
    opened, limits, beside = [], [], []

    class Watching(Watchdog):
        def __init__(self, *args, **options):
            limits.append((options["seconds"], options["stop_seconds"]))
            super().__init__(*args, **options)

    real = training_run.open_sinks
    monkeypatch.setattr(
        training_run,
        "open_sinks",
        lambda names, info, more: opened.append((names, info.project)) or real([], info, more),
    )
    monkeypatch.setattr(training_run, "Watchdog", Watching)
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": f"{i}+1=", "said": str(i + 1)}) + "\n" for i in range(8)))
    words = (
        *("trainer.total_training_steps=2", "trainer.save_freq=-1", "data.num_val_samples=4"),
        *("trainer.project_name=mine", "trainer.logger=[console,tensorboard]", "trainer.log_val_generations=0"),
        *("trainer.watchdog_seconds=0.3", "trainer.watchdog_stop_seconds=88", "trainer.console_table_freq=1"),
        *(f"data.sft_files={examples}", "data.sft_batch_size=3", f"{ACTOR}.sft_weight=0.25"),
        *("data.response_key=said", f"{ROLLOUT}.calculate_log_probs=false"),
        *(f"trainer.default_local_dir={tmp_path / 'mine'}", "trainer.experiment_name=try"),
        *("trainer.callbacks=[steps_of_a_test:Steps]", "trainer.tags=[short, cpu]"),
    )
    (tmp_path / "steps_of_a_test.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = Trainer(small_config(tmp_path, model, *words), reward_fn=even_first_byte)
    shown = io.StringIO()
    trainer.console.rich = RichConsole(file=shown, force_terminal=True, width=100, highlight=False, color_system=None)
    stacks, draw, update = trainer.run.path / FILE, trainer.parts.sampler.next_batch, trainer.parts.roles.update_policy

    def next_batch():
        end = time.monotonic() + (0 if beside else 30)  # in the first step
        while not stacks.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return draw()

    def update_policy(*args, **options):
        beside.append((options["beside"].batch.num_sequences, options["beside"].weight))
        return update(*args, **options)

    trainer.parts.sampler.next_batch, trainer.parts.roles.update_policy = next_batch, update_policy
    trainer.fit()
    assert trainer.run.path == tmp_path / "mine" / "try"
    assert opened == [(["console", "tensorboard"], "mine")]
    assert limits == [(0.3, 88)] and "gen" in stacks.read_text()
    assert beside == [(3, 0.25)] * 2
    titles = [line for line in shown.getvalue().splitlines() if "kept" in line and "s/step" in line]
    assert len(titles) == 3  # before the rows of steps 0, 1 and 2
    assert "held-out accuracy" in shown.getvalue() and "the same questions" not in shown.getvalue()
    assert sys.modules.pop("steps_of_a_test").Steps.seen == [1, 2]
    assert summary(read_run(trainer.run.path))["tags"] == ["short", "cpu"]
    row = list(trainer.run.rows())[-1]
    assert "actor/grad_norm" in row and "actor/rollout_kl" not in row
