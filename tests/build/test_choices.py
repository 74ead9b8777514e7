"""What a run is built of, choice by choice: lengths, lags, micro-batches, rewards, judges, rows, resumes."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.build import engines, rewards, sizes
from gspo.build.data import rows
from gspo.build.data.given import Inputs
from gspo.build.data.training_data import (
    PromptData,
    check_code_tests,
    count_seen,
    example_columns,
    pair_columns,
    prompt_columns,
)
from gspo.build.fingerprint import ARITHMETIC, DATA, RANKS, SCHEDULE, TRAINED_ON, check_fingerprint, fingerprint
from gspo.build.memory import MemoryPlan, in_words
from gspo.build.rewards import build_scorer, judge_settings, names_reward, reward_lag, try_reward
from gspo.build.role_settings import critic_settings, layout_kind, policy_settings, reference_settings
from gspo.build.settings import build_objective, sampling_settings, training_params, validation_params
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import TrainerConfig, load
from gspo.config.loading import tree
from gspo.data.columns import Columns
from gspo.data.rows import DataError, Row, user_message
from gspo.environments.protocol import EnvironmentProblem
from gspo.plan.memory import Memory
from gspo.rewards import Overlong, RewardError, RewardSpec, make_scorer
from gspo.rewards.compose import Finishing, RewardScale
from gspo.rewards.judge.settings import Criterion, JudgeSettings
from gspo.rewards.mixed import MixedScorer
from gspo.types import Prompt, Reward

A, R, M, F = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "algorithm.filter_groups",
)
J, BUFFER = "reward.judge", "reward_model.reward_kwargs.overlong_buffer_cfg"
JUDGED = {f"{J}.base_url": "http://h/v1", f"{J}.model": "m"}


@functools.cache
def _plain() -> TrainerConfig:
    return load(None, ["data.train_files=arithmetic", f"{M}.path=some/model"]).config


def config(values: dict[str, Any] | None = None) -> TrainerConfig:
    found = copy.deepcopy(_plain())
    for key, value in (values or {}).items():
        tree.put(found, key, value)
    return found


def test_the_engines_own_length_of_a_response_comes_first() -> None:
    both = config({f"{R}.response_length": 7, "data.max_response_length": 9})
    assert (training_params(both).max_tokens, validation_params(both).max_tokens) == (7, 7)
    assert training_params(config({"data.max_response_length": 9})).max_tokens == 9


def test_missing_rewards_are_limited_by_the_environment_where_there_is_one() -> None:
    rates = {"reward.max_failure_rate": 0.1, "environment.max_failure_rate": 0.2}
    assert sampling_settings(config(rates)).max_failure_rate == 0.1
    with_turns = sampling_settings(config({**rates, "environment.name": "guess"}), 3)
    assert (with_turns.max_failure_rate, with_turns.reward_lag) == (0.2, 3)
    assert sampling_settings(config()).reward_lag == 1
    passed = config({**rates, f"{R}.multi_turn.enable": True})  # in Python: the config names none
    assert sampling_settings(passed, environment=[len]).max_failure_rate == 0.2
    with pytest.raises(EnvironmentProblem, match="needs an environment"):
        sampling_settings(passed)


def test_what_the_objective_adds_to_the_loss() -> None:
    plain = build_objective(config())
    assert (plain.normalize, plain.reads_teacher, plain.distill_weight, plain.turn_discount) == (
        False,
        False,
        0.0,
        None,
    )
    full = build_objective(
        config(
            {
                "algorithm.normalize_advantages": True,
                "algorithm.adv_estimator": "opd",
                "algorithm.distill_weight": 0.3,
                "algorithm.turn_discount": 0.7,
                "algorithm.turn_rewards": "return_to_go",
            }
        )
    )
    assert (full.normalize, full.reads_teacher, full.distill_weight, full.turn_discount) == (True, True, 0.3, 0.7)
    assert build_objective(config({"algorithm.turn_discount": 0.7})).turn_discount is None
    one_side = build_objective(config({f"{A}.clip_ratio": 0.3, f"{A}.clip_ratio_low": 0.1}))
    assert (one_side.settings.clip_low, one_side.settings.clip_high) == (0.1, 0.3)
    other = build_objective(config({f"{A}.clip_ratio": 0.3, f"{A}.clip_ratio_high": 0.1}))
    assert (other.settings.clip_low, other.settings.clip_high) == (0.3, 0.1)


SCORE = f"{R}.log_prob"


@pytest.mark.parametrize(
    ("values", "cut"),
    [
        ({}, (None, None)),
        ({f"{SCORE}_max_token_len_per_gpu": 30}, (30, None)),
        ({f"{SCORE}_use_dynamic_bsz": True}, (40, None)),
        ({f"{SCORE}_use_dynamic_bsz": True, f"{SCORE}_max_token_len_per_gpu": 30}, (30, None)),
        ({f"{SCORE}_use_dynamic_bsz": False, f"{SCORE}_max_token_len_per_gpu": 30}, (None, None)),
        ({f"{SCORE}_micro_batch_size_per_gpu": 3}, (None, 3)),
        ({f"{SCORE}_micro_batch_size_per_gpu": 3, f"{SCORE}_max_token_len_per_gpu": 30}, (30, None)),
        ({f"{SCORE}_micro_batch_size_per_gpu": 3, f"{SCORE}_use_dynamic_bsz": True}, (40, None)),
    ],
)
def test_how_old_log_probs_are_cut(values: dict[str, Any], cut: tuple[int | None, int | None]) -> None:
    got = policy_settings(config({f"{A}.ppo_max_token_len_per_gpu": 40, **values}))
    assert (got.score_tokens, got.score_rows) == cut


@pytest.mark.parametrize(
    ("micro", "values", "cut"),
    [
        ({}, {}, (40, 1)),
        ({}, {"micro_batch_size_per_gpu": 3}, (None, 3)),
        ({}, {"use_dynamic_bsz": False}, (None, 1)),
        ({}, {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": 3}, (40, 1)),
        ({}, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 30}, (30, 1)),
        ({}, {"micro_batch_size_per_gpu": 3, "max_token_len_per_gpu": 30}, (None, 3)),
        ({f"{A}.ppo_micro_batch_size_per_gpu": 5, f"{A}.use_dynamic_bsz": False}, {}, (None, 5)),
        (
            {f"{A}.ppo_micro_batch_size_per_gpu": 5, f"{A}.use_dynamic_bsz": False},
            {"max_token_len_per_gpu": 30},
            (30, 5),
        ),
        ({f"{A}.ppo_micro_batch_size_per_gpu": 5, f"{A}.use_dynamic_bsz": False}, {"use_dynamic_bsz": True}, (40, 5)),
    ],
)
def test_how_the_reference_is_cut(micro: dict[str, Any], values: dict[str, Any], cut: tuple[int | None, int]) -> None:
    named = {f"actor_rollout_ref.ref.log_prob_{name}": value for name, value in values.items()}
    c = config({f"{A}.ppo_max_token_len_per_gpu": 40, **micro, **named})
    got = reference_settings(c, policy_settings(c))
    assert (got.micro_batch_tokens, got.micro_batch_rows) == cut


def test_layouts_and_micro_batches_without_a_size() -> None:
    kinds = {(True, True): "shared", (True, False): "shared", (False, True): "packed", (False, False): "plain"}
    for (shared, packed), kind in kinds.items():
        assert layout_kind(config({f"{M}.use_shared_prefix": shared, f"{M}.use_remove_padding": packed})) == kind
    unset = policy_settings(config({f"{A}.use_dynamic_bsz": False, f"{A}.ppo_max_token_len_per_gpu": 40}))
    assert (unset.micro_batch_tokens, unset.micro_batch_rows) == (40, 1)
    critic = critic_settings(config({f"{A}.ppo_max_token_len_per_gpu": 40, "critic.ppo_max_token_len_per_gpu": 30}))
    assert (critic.micro_batch_tokens, critic.micro_batch_rows) == (30, 1)


def test_the_judge_gets_every_key_and_held_out_rows_another_one(tmp_path: Path) -> None:
    rubric, question = tmp_path / "rubric.toml", tmp_path / "question.txt"
    rubric.write_text('[[criteria]]\nname = "a"\ntext = "t"\nchoices = ["x", "y"]\n')
    question.write_text("\n  Grade {response}. \n")
    values = {
        "base_url": "http://h/v1",
        "model": "m",
        "kind": "rubric",
        "api_key_env": "KEY",
        "rubric": str(rubric),
        "prompt": str(question),
        "view": "full_rollout",
        "max_score": 7.0,
        "samples": 3,
        "temperature": 0.4,
        "max_tokens": 55,
        "timeout": 6.0,
        "retries": 8,
        "max_concurrent": 9,
        "requests_per_minute": 11.0,
        "tokens_per_minute": 12.0,
        "cache": "verdicts.sqlite",
        "max_tokens_spent": 13,
    }
    judge = config({f"{J}.{name}": value for name, value in values.items()}).reward.judge
    wanted = {
        **values,
        "rubric": (Criterion("a", "t", 1.0, ("x", "y")),),
        "prompt": "Grade {response}.",
        "cache": str(tmp_path / "verdicts.sqlite"),
    }
    assert judge_settings(judge, tmp_path) == JudgeSettings(**wanted)
    assert judge_settings(judge, tmp_path, held_out=True) == JudgeSettings(**wanted)
    assert judge_settings(judge, None).cache is None
    judge.eval.model, judge.eval.base_url, judge.eval.api_key_env = "n", "http://i/v1", "OTHER"
    held_out = judge_settings(judge, tmp_path, held_out=True)
    assert (held_out.model, held_out.base_url, held_out.api_key_env) == ("n", "http://i/v1", "OTHER")
    assert judge_settings(judge, tmp_path).model == "m"
    judge.cache, judge.kind = "/elsewhere/v.sqlite", "score"
    other = judge_settings(judge, None)
    assert (other.cache, other.rubric) == ("/elsewhere/v.sqlite", ())
    judge.cache = None
    assert judge_settings(judge, tmp_path).cache is None
    judge.prompt = "nowhere.txt"
    with pytest.raises(RewardError, match=r"reward\.judge\.prompt='nowhere.txt' cannot be read"):
        judge_settings(judge, None)
    for name in ("base_url", "model"):
        broken = config(JUDGED).reward.judge
        setattr(broken, name, None)
        with pytest.raises(RewardError, match="a judge needs"):
            judge_settings(broken, None)


def built(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], reward_fn: Any = None, **options: Any) -> Any:
    """What functions and judges a scorer is built of."""
    made: list[tuple[Any, Any, Any]] = []
    monkeypatch.setattr(
        rewards, "make_scorer", lambda reward, **keys: made.append((reward, keys["manager"], keys["scale"]))
    )
    monkeypatch.setattr(rewards, "JudgeScorer", lambda settings, cache, scope: (settings.model, settings.kind, scope))
    scorer = build_scorer(config(values), reward_fn, **options)
    parts = (
        [(p.name, p.weight, p.kind, p.orders, p.scorer) for p in scorer.parts]
        if isinstance(scorer, MixedScorer)
        else []
    )
    return made, parts


def test_functions_alone_are_finished_by_themselves_and_beside_a_judge_by_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaled = {"reward.scale": 2.0, "reward_model.reward_manager": "dapo"}
    (made,), parts = built(monkeypatch, {**scaled, "reward.functions": [{"name": "math"}]})
    assert made == ([{"name": "math"}], "dapo", RewardScale(2.0)) and parts == []
    (made,), parts = built(
        monkeypatch, {**scaled, **JUDGED, f"{J}.weight": 0.5, "reward.functions": [{"name": "math", "weight": 3}]}
    )
    assert made == ([{"name": "math", "weight": 3}], "naive", None)
    assert parts == [("math", 1.0, "rule", False, None), ("judge", 0.5, "judge", False, ("m", "score", "train"))]


def test_the_rule_of_each_row_is_only_logged_beside_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    (made,), parts = built(monkeypatch, JUDGED, held_out=True)
    assert made[0] == RewardSpec("default", weight=0.0)
    assert parts == [("rule", 0.0, "rule", False, None), ("judge", 1.0, "judge", False, ("m", "score", "held out"))]
    (made,), parts = built(
        monkeypatch, {**JUDGED, "custom_reward_function.path": "a.py", "custom_reward_function.name": "f"}
    )
    assert made[0] == RewardSpec("f", path="a.py") and parts[0][:2] == ("rule", 1.0)
    assert made[0].key == "custom_reward_function.path"
    (made,), parts = built(monkeypatch, {**JUDGED, "reward.functions": [{"name": "a", "weight": 0}]}, reward_fn=len)
    assert made[0] is len and parts[0][:2] == ("rule", 1.0)


def test_judges_are_named_weighted_and_changed_by_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"name": "a", "weight": 0},
        {"name": "b", "weight": 0},
        {"judge": {"kind": "rank", "model": "r"}, "weight": 0.25},
        {"judge": {}},
        {"judge": {}, "name": "strict", "weight": 2},
    ]
    _, parts = built(monkeypatch, {**JUDGED, f"{J}.weight": 9.0, "reward.functions": entries})
    assert parts == [
        ("rule", 0.0, "rule", False, None),  # both functions are only logged
        ("judge", 0.25, "judge", True, ("r", "rank", "train")),
        ("judge_2", 1.0, "judge", False, ("m", "score", "train")),
        ("strict", 2.0, "judge", False, ("m", "score", "train")),
    ]


def test_the_manager_its_penalty_and_the_scale_finish_a_reward() -> None:
    finishing = rewards._finishing
    assert finishing(config()) == Finishing("naive", None, None)
    on = {
        "reward_model.reward_manager": "dapo",
        f"{BUFFER}.enable": True,
        f"{BUFFER}.len": 5,
        "data.max_response_length": 40,
    }
    assert finishing(config(on)) == Finishing("dapo", Overlong(40, 5, 1.0, False), None)
    assert finishing(config({**on, f"{BUFFER}.enable": False})).overlong is None
    for key, scale in (
        ("scale", RewardScale(scale=3.0)),
        ("bias", RewardScale(bias=3.0)),
        ("clip", RewardScale(clip=3.0)),
    ):
        assert finishing(config({f"reward.{key}": 3.0})).scale == scale


PROMPT = Prompt("row", (), (1,), "exact", "5")


def test_when_rewards_are_collected() -> None:
    cheap, code = make_scorer("exact"), make_scorer("code")
    by_row = make_scorer(None)
    mixed = [PROMPT, Prompt("other", (), (1,), "code", None)]
    assert reward_lag(config({"reward.lag": 9}), cheap, [PROMPT], on_gpu=False) == 9
    assert reward_lag(config({"reward.lag": 0}), code, [PROMPT], on_gpu=True) == 0
    assert reward_lag(config(), code, [PROMPT], on_gpu=False) == 1
    assert reward_lag(config(), cheap, [PROMPT], on_gpu=True) == 1
    assert reward_lag(config(), code, [PROMPT], on_gpu=True) == 4
    assert reward_lag(config(), by_row, [PROMPT], on_gpu=True) == 1
    assert reward_lag(config(), by_row, mixed, on_gpu=True) == 4
    assert reward_lag(config(JUDGED), MixedScorer([]), [PROMPT], on_gpu=False) == 4


@pytest.mark.parametrize(
    ("values", "fn", "named"),
    [
        ({}, None, False),
        ({}, len, True),
        ({"reward.functions": [{"name": "math"}]}, None, True),
        ({"custom_reward_function.path": "a.py"}, None, True),
        (JUDGED, None, True),
        ({"reward_model.enable": True}, None, True),
    ],
)
def test_what_counts_as_a_reward_that_is_set(values: dict[str, Any], fn: Any, named: bool) -> None:
    assert names_reward(config(values), fn) is named
    assert rewards.grades(config(values), Prompt("r", (), (), "no such source"), fn) is named
    assert rewards.grades(config(values), PROMPT, fn)


def test_a_metric_that_the_reward_does_not_return_falls_back_or_is_refused() -> None:
    def scored(**reward: Any) -> Any:
        return make_scorer(lambda prompt, response: Reward(1.0, **reward))

    def metric(scorer: Any, name: str, *, enable: bool = True, explicit: bool = True, **options: Any) -> str:
        c = config({f"{F}.enable": enable})
        if explicit:
            c.algorithm.filter_groups.metric = name  # type: ignore[assignment]
        else:
            c.algorithm.filter_groups.__dict__["metric"] = name
        try:
            return try_reward(c, scorer, PROMPT, **options)
        finally:
            scorer.close()

    assert metric(scored(acc=1.0), "acc") == "acc"
    assert metric(scored(extra={"style": 1.0}), "style") == "style"
    for known in ("seq_reward", "seq_final_reward", "score"):
        assert metric(scored(), known) == known
    assert metric(scored(), "acc", explicit=False) == "seq_reward"
    assert metric(scored(), "acc", enable=False) == "acc"
    assert metric(scored(), "acc", uses_metric=False) == "acc"
    with pytest.raises(
        RewardError, match=r"'acc' is not returned .* it returns score, seq_final_reward, seq_reward, x\."
    ):
        metric(scored(extra={"x": 1.0}), "acc")


def test_columns_of_prompts_examples_and_pairs() -> None:
    keys = {"prompt_key": "p", "ground_truth_key": "g", "data_source_key": "d", "response_key": "r"}
    c = config({f"data.{name}": value for name, value in keys.items()})
    assert prompt_columns(c) == Columns("p", "g", "d")
    assert example_columns(c) == Columns("p", None, "d", "r")
    assert pair_columns(c) == Columns("p", None, "d")


def test_questions_that_are_trained_on_are_counted_by_their_text() -> None:
    def prompt(uid: str, *texts: str) -> Prompt:
        return Prompt(uid, tuple({"role": "user", "content": text} for text in texts), (1,))

    train = [prompt("a", "x  y"), prompt("b", "z", "w")]
    held_out = [prompt("c", " x\ny "), prompt("d", "z"), prompt("e", "z", "w"), prompt("f", "x y")]
    assert count_seen(train, held_out) == 3 and count_seen([], held_out) == 0
    said: list[str] = []
    PromptData(train, held_out, 3, []).warn(said.append)
    PromptData(train, held_out, 0, []).warn(said.append)
    assert len(said) == 1 and said[0].startswith("3 of the 4 evaluation questions are also training rows")
    assert PromptData(train, held_out, 3, []).held_out_facts() == {"questions": 4, "also_trained_on": 3}
    assert PromptData(train, [], 0, []).held_out_facts() == {}


def test_tests_of_code_are_checked_by_row() -> None:
    good = Prompt("good", (), (1,), "code", {"inputs": ["1"], "outputs": ["1"]})
    check_code_tests([good, Prompt("text", (), (1,), "math", "x")])
    with pytest.raises(DataError, match=r"bad: field 'ground_truth' cannot be graded: tests: 1 inputs and 0 outputs"):
        check_code_tests([good, Prompt("bad", (), (1,), "code", {"inputs": ["1"], "outputs": []})])


def test_which_rows_are_held_out_of_those_that_are_passed() -> None:
    given = [Row(str(i), user_message(str(i))) for i in range(10)]

    def split(values: dict[str, Any], train: Any = given, val: Any = None) -> tuple[Any, Any]:
        return rows.given_datasets(config(values), Columns(), train, val, None)

    assert split({}) == (given, [])
    assert split({}, None) == (None, None)
    assert split({"data.val_split": 0.2}, val=given[:1]) == (given, given[:1])
    assert split({"data.val_files": "math", "data.val_split": 0.2}) == (given, None)
    train, held_out = split({"data.val_split": 0.2})
    assert len(held_out) == 2 and sorted([*train, *held_out], key=lambda row: int(row.uid)) == given
    shares = [
        ({"data.val_split": 0.2}, 0.2),
        ({"data.val_split": "test"}, None),
        ({"data.val_split": 0.2, "data.val_files": "x"}, None),
    ]
    assert [rows.held_out_share(config(values)) for values, _ in shares] == [share for _, share in shares]


def test_the_first_training_rows_are_limited_by_both_numbers() -> None:
    for values, limit, count in (
        ({}, 5, 5),
        ({"data.num_train_samples": 3}, 5, 3),
        ({"data.num_train_samples": 7}, 5, 5),
    ):
        assert len(rows.training_rows(config(values), limit)) == count
    assert len(rows.training_rows(config({"data.num_train_samples": 3}), None)) == 3


def test_an_item_of_verls_dataset_keeps_its_messages_under_the_prompts_key() -> None:
    raw = {"raw_prompt": ({"role": "user", "content": "q"},), "x": 1}
    assert rows._with_prompt(raw, "prompt") == {"prompt": [{"role": "user", "content": "q"}], "x": 1}
    assert rows._with_prompt({**raw, "prompt": 3}, "prompt") == {**raw, "prompt": 3}
    assert rows._with_prompt({"x": 1}, "prompt") == {"x": 1} and rows._with_prompt([1], "prompt") == [1]


def test_what_was_passed_in_python_in_words() -> None:
    assert Inputs().facts() == {} and Inputs(val_reward_fn=len).facts() == {}
    assert Inputs(train_dataset=[1, 2]).facts() == {"train_dataset": "2 rows passed in Python", "val_dataset": "none"}
    assert Inputs(train_dataset=[1, 2]).facts(0.25)["val_dataset"] == "0.25 of the training rows"
    assert Inputs(train_dataset=[1], val_dataset=[]).facts(0.25)["val_dataset"] == "0 rows passed in Python"
    assert Inputs(val_dataset=[1]).facts() == {"val_dataset": "1 rows passed in Python"}
    assert Inputs(reward_fn=[len, max]).facts() == {"reward_fn": "len, max, passed in Python"}


FACTS = SimpleNamespace(shapes=[["w", [2, 3]]], frozen_digest="frozen", num_ranks=1)


def prints(rows: list[Any] | None = None, steps: int = 10, scheduler: str = "cosine", **facts: Any) -> dict[str, Any]:
    c = config({f"{A}.optim.lr_scheduler_type": scheduler})
    return fingerprint(c, SimpleNamespace(**{**vars(FACTS), **facts}), rows or [("a", [1], "x")], steps)  # type: ignore[arg-type]


def test_a_run_is_resumed_only_with_the_same_model_data_and_arithmetic() -> None:
    now = prints()
    assert check_fingerprint(now, now) == [] and now[TRAINED_ON] == "rollouts"
    for other in (
        prints([("a", [1], "y")]),
        prints(shapes=[["w", [3, 2]]]),
        prints(frozen_digest="other"),
        {**now, "threads": -1},
        {**now, "device": "other"},
        {**now, TRAINED_ON: "pairs"},
    ):
        with pytest.raises(ResumeRefused, match="cannot be resumed to the bit here"):
            check_fingerprint(other, now)


def test_other_ranks_a_branch_and_earlier_checkpoints_are_compared_by_what_they_have() -> None:
    now = prints(num_ranks=2)
    assert check_fingerprint({**prints(), "threads": -1, "device": "other"}, now) == []
    with pytest.raises(ResumeRefused, match=r"training data: '\w+' in the checkpoint, '\w+' now"):
        check_fingerprint({**prints([("b", [1], "x")]), "threads": -1}, now)
    branch = {key: value for key, value in now.items() if key not in (SCHEDULE, DATA, TRAINED_ON)}
    assert check_fingerprint(branch, now) == []
    with pytest.raises(ResumeRefused, match="trained on: 'rollouts' in the checkpoint, 'answers' now"):
        check_fingerprint(branch, {**now, TRAINED_ON: "answers"})
    assert set(ARITHMETIC) == {RANKS, "threads", "device"}


def test_the_length_of_a_schedule_may_change_and_is_said() -> None:
    assert prints(scheduler="constant")[SCHEDULE] is None and prints()[SCHEDULE] == 10
    (note,) = check_fingerprint(prints(steps=10), prints(steps=20))
    assert "ends at step 20, not 10" in note
    assert check_fingerprint(prints(scheduler="constant"), prints()) == []
    assert check_fingerprint(prints(), prints(scheduler="constant")) == []


def test_a_memory_plan_in_words_and_numbers() -> None:
    assert [in_words(n) for n in (1 << 20, (1 << 30) - 1, 1 << 30, 3 << 29)] == [
        "1.0 MiB",
        "1024.0 MiB",
        "1.00 GiB",
        "1.50 GiB",
    ]
    memory = Memory(
        {"weights": 60.0, "cache": 30.0, "logits": 5.0}, {"cache": ("generation",), "logits": ("training",)}
    )
    plan = MemoryPlan(memory, 10, 100)
    assert (plan.peak, plan.fits, plan.largest) == (100, True, "weights")
    assert not MemoryPlan(memory, 11, 100).fits
    assert plan.to_dict()["peak_stage"] == "generation" and plan.to_dict()["held"] == {
        "weights": 60,
        "cache": 30,
        "logits": 5,
    }


def test_which_runs_the_memory_plan_holds_for() -> None:
    assert sizes._is_planned(config())
    for key, value in (
        ("trainer.memory_check", "off"),
        ("trainer.backend", "ray"),
        (f"{A}.strategy", "fsdp2"),
        (f"{R}.name", "vllm"),
        (f"{R}.mode", "async"),
        (f"{R}.num_workers", 2),
    ):
        assert not sizes._is_planned(config({key: value})), key
    assert sizes._is_planned(config({"trainer.memory_check": "warn", f"{R}.num_workers": 1}))


def test_the_largest_part_that_may_shrink_is_halved_down_to_its_least() -> None:
    def smaller(parts: dict[str, float], *words: str) -> dict[str, Any]:
        resolved = load(
            None, [f"{M}.path=some/model", "data.max_prompt_length=100", "data.max_response_length=50", *words]
        )
        return sizes._smaller(resolved, SimpleNamespace(memory=SimpleNamespace(at_peak=parts)))  # type: ignore[arg-type]

    both = {"weights": 9.0, "KV cache": 3.0, "activations of a micro-batch": 4.0, "prefill": 2.0}
    slots, tokens, prefill = sizes.SLOTS, sizes.TOKENS, sizes.PREFILL
    default = {key: tree.leaves()[key].default for key in (slots, tokens, prefill)}
    assert smaller(both) == {tokens: default[tokens] // 2}
    assert smaller({**both, "KV cache": 5.0}) == {slots: default[slots] // 2}
    assert smaller(both, f"{tokens}=900") == {slots: default[slots] // 2}
    assert smaller(both, f"{tokens}=900", f"{slots}=90") == {prefill: default[prefill] // 2}
    assert smaller(both, f"{tokens}=900", f"{slots}=90", f"{prefill}=900") == {sizes.CHECKPOINTING: True}
    assert smaller({"weights": 9.0}) == {}
    assert smaller({"prefill": 1.0}, f"data.max_prompt_length={default[prefill] // 2}") == {
        prefill: default[prefill] // 2
    }
    assert smaller({"prefill": 1.0}, f"data.max_prompt_length={default[prefill] // 2 + 1}") == {}


def test_how_engines_are_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        f"{R}.max_num_batched_tokens": 11,
        f"{R}.gpu_memory_utilization": 0.3,
        f"{R}.enforce_eager": True,
        f"{R}.free_cache_engine": True,
        f"{R}.tensor_model_parallel_size": 2,
        f"{R}.enable_chunked_prefill": False,
        f"{R}.enable_prefix_caching": False,
        f"{R}.engine_kwargs": {"x": 1},
    }
    ahead = {f"{R}.mode": "async", f"{R}.max_head_offpolicyness": 1}
    native = {"prefill_tokens": 11, "memory_utilization": 0.3, "eager": True, "free_cache": True, "keep_cache": False}
    assert engines.native_options(config(keys)) == native
    kept = engines.native_options(config({**keys, f"{R}.keep_cache": True}))
    assert (kept["free_cache"], kept["keep_cache"]) == (False, True)
    assert not engines.native_options(config({**keys, **ahead}))["free_cache"]
    assert not engines.native_options(config({**keys, f"{R}.free_cache_engine": False}))["free_cache"]
    vllm = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "max_num_batched_tokens": 11,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "sleep": True,
        "engine_kwargs": {"x": 1},
    }
    monkeypatch.setattr(engines, "load_generation_config", lambda *args, **more: SimpleNamespace(eos_token_id=[7, 3]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    tokenizer = SimpleNamespace(eos_token_id=5, pad_token_id=0)

    def spec(values: dict[str, Any], count: int = 1) -> Any:
        return engines.engine_spec(config({**keys, **values}), tokenizer, torch.device("cpu"), count)

    found = spec(
        {f"{R}.name": "vllm", f"{M}.tokenizer_path": "tok", f"{R}.max_num_seqs": 6, "trainer.plugins": ["p.py"]}, 2
    )
    assert (found.kind, found.model, found.tokenizer, found.num_slots) == ("vllm", "some/model", "tok", 6)
    assert (found.eos_token_ids, found.pad_token_id, found.plugins, found.options) == ((3, 5, 7), 0, ("p.py",), vllm)
    assert found.num_threads == 4 and spec({**ahead}, 2).num_threads == 3 and spec({}, 20).num_threads == 1
    assert spec({f"{R}.name": "mine:engine"}).options == {"x": 1} and spec({}).options == native
    assert spec({f"{M}.attn_implementation": "flex_attention"}).attn_implementation is None
    assert spec({f"{M}.attn_implementation": "sdpa"}).attn_implementation == "sdpa"
    assert spec({}).tokenizer == "some/model" and spec({}).dtype == "float32"
    lengths = {"data.max_prompt_length": 10, "data.max_response_length": 20}
    assert spec(lengths).max_length == 30 and spec({**lengths, f"{R}.max_model_len": 50}).max_length == 50


@pytest.mark.parametrize(
    ("own", "models", "stops"),
    [(5, None, [5]), (5, 5, [5]), (5, [7, 3], [3, 5, 7]), (None, 4, [4]), (None, None, []), (0, (0, 2), [0, 2])],
)
def test_tokens_that_end_a_response(own: int | None, models: Any, stops: list[int]) -> None:
    assert engines.stop_tokens(SimpleNamespace(eos_token_id=models), SimpleNamespace(eos_token_id=own)) == stops
    assert engines.stop_tokens(None, SimpleNamespace(eos_token_id=5)) == [5]


def test_the_token_that_fills_up_and_tied_weights_once() -> None:
    for own, stops, wanted in ((0, [5], 0), (3, [], 3), (None, [5, 7], 5), (None, [], 0)):
        assert engines.pad_token(SimpleNamespace(pad_token_id=own), stops) == wanted
    tied, empty = torch.ones(2, 3), torch.empty(0)
    tensors = {"a": tied, "b": tied, "c": tied.view(3, 2), "d": tied.clone(), "e": empty, "f": empty}
    assert list(engines._drop_tied_duplicates(tensors)) == ["a", "c", "d", "e", "f"]
    lengths = {
        "data.max_prompt_length": 10,
        "data.max_response_length": 20,
        f"{R}.prompt_length": 1,
        f"{R}.response_length": 2,
    }
    assert engines._max_length(config(lengths)) == 3
