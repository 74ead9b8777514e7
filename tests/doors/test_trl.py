"""TRL's own examples with the import changed: they train what TRL would, told by metrics and weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from gspo.compat.trl import GRPOConfig, GRPOTrainer
from gspo.compat.trl.rewards import accuracy_reward, think_format_reward
from gspo.config import ConfigErrors
from gspo.runs.reading import read_groups
from tests.doors.worlds import MODELS, rows
from tests.support.small_run import make_reward_model

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i + 1)} for i in range(16)]
SMALL = {"max_completion_length": 6, "max_steps": 2, "use_cpu": True, "gradient_checkpointing": False}


def even(completions, **kwargs):
    """Right when the first character's code is even: about half of a random model's answers."""
    return [float(bool(c[0]["content"]) and ord(c[0]["content"][0]) % 2 == 0) for c in completions]


def length(completions, solution, **kwargs):
    assert len(solution) == len(completions)
    return [float(len(c[0]["content"])) for c in completions]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(here, reward=even, name="run", **fields):
    args = GRPOConfig(output_dir="out", run_name=name, **{**SMALL, **fields})
    trainer = GRPOTrainer(MODELS[0], reward_funcs=reward, args=args, train_dataset=ROWS)
    assert trainer.train()["steps"] == fields.get("max_steps", 2)
    return here / "out" / name


def weights(run):
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def same(left, right):
    return all(torch.equal(left[k], right[k]) for k in left)


def test_the_readme_example(here):
    """Model, accuracy_reward and rows; everything else is TRL's default, with the run made short."""
    trainer = GRPOTrainer(model=MODELS[0], reward_funcs=accuracy_reward, args=GRPOConfig(**SMALL), train_dataset=ROWS)
    assert trainer.train()["steps"] == 2
    (run,) = [path for path in (here / "trainer_output").iterdir() if (path / "metrics.jsonl").exists()]
    (first, second) = rows(run)
    assert (first["actor/clip_ratio_low"], first["actor/clip_ratio_high"]) == (0.2, 0.2)
    assert first["train/groups_trained"] == 1 and "actor/kl_loss" not in first
    assert (first["actor/lr"], second["actor/lr"]) == (1e-6, pytest.approx(5e-7))  # linear to 0
    trainer.save_model("final")
    assert (here / "final" / "model.safetensors").exists()


def test_batch_sizes_count_completions(here):
    run = train(here, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4)
    assert [row["train/groups_trained"] for row in rows(run)] == [2, 2]


def test_the_level_of_the_ratio_is_the_loss(here):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "steps_per_generation": 4, "learning_rate": 1e-2}
    token = train(here, name="token", **sizes)
    sequence = train(here, name="sequence", importance_sampling_level="sequence", epsilon=3e-4, **sizes)
    assert not same(weights(token), weights(sequence))


def test_a_reward_model_is_named_among_the_functions(here):
    """By the folder or hub name of a classifier, with the weight of its place."""
    scores = make_reward_model(here / "scores", "embedded")
    run = train(here, reward=[even, str(scores)], reward_weights=[1.0, 0.5], num_generations=4)
    for record in read_groups(run / "groups" / "step-000001.jsonl.gz"):
        for response in record["responses"]:
            parts = response["extra"]
            assert response["score"] == pytest.approx(parts["reward/rule"] + 0.5 * parts["reward/model"])
    alone = train(here, reward=str(scores), name="alone", num_generations=4)
    (record, *_) = read_groups(alone / "groups" / "step-000001.jsonl.gz")
    assert all(r["score"] == r["extra"]["reward/model"] != 0 for r in record["responses"])


def test_reward_weights_add_the_functions(here):
    run = train(here, reward=[even, length], reward_weights=[1.0, -0.5], num_generations=4)
    (group, *_) = read_groups(run / "groups" / "step-000001.jsonl.gz")
    for response in group["responses"]:
        parts = response["extra"]
        assert response["score"] == parts["reward/even"] - 0.5 * parts["reward/length"]
    with pytest.raises(ValueError, match="reward_weights has 1 numbers"):
        GRPOTrainer(MODELS[0], [even, length], GRPOConfig(reward_weights=[1.0]), ROWS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"scale_rewards": "group"}, {"scale_rewards": "batch"}),
        ({"scale_rewards": "group"}, {"scale_rewards": "none"}),
        ({}, {"mask_truncated_completions": True}),
        ({}, {"adam_beta1": 0.5, "adam_beta2": 0.9}),
        ({}, {"beta": 0.5, "max_steps": 3}),
        ({}, {"seed": 1}),
        ({}, {"temperature": 0.5}),
    ],
)
def test_a_field_changes_what_is_trained(here, one, other):
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 1e-2, "max_steps": 2}
    steps = {"max_steps": other.get("max_steps", 2)}
    left, right = (
        weights(train(here, length, name, **{**sizes, **steps, **fields}))
        for name, fields in (("a", one), ("b", other))
    )
    assert not same(left, right)


def test_no_truncated_completion_is_trained_on_when_they_are_masked(here):
    run = train(here, mask_truncated_completions=True, num_generations=4, max_completion_length=3)
    (group, *_) = read_groups(run / "groups" / "step-000001.jsonl.gz")
    cut = [r for r in group["responses"] if r["finish_reason"] == "length"]
    assert cut and all(r["advantage"] == 0 for r in cut)  # the mean over its trained tokens, of which it has none


def test_saving_and_evaluating_by_strategy(here):
    args = GRPOConfig(
        output_dir="out", run_name="run", eval_strategy="steps", eval_steps=1, save_strategy="no", **SMALL
    )
    GRPOTrainer(MODELS[0], even, args, ROWS, eval_dataset=ROWS[:2]).train()
    run = here / "out" / "run"
    assert sorted(p.name for p in (run / "evals").glob("step-*")) == [f"step-00000{i}.jsonl.gz" for i in (1, 2)]
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-000002"]


def test_a_model_in_memory_and_a_lora_config(here):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODELS[0])
    args = GRPOConfig(output_dir="out", run_name="run", **SMALL)
    adapter = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")
    tokenizer = AutoTokenizer.from_pretrained(MODELS[0])
    trainer = GRPOTrainer(model, even, args, ROWS, processing_class=tokenizer, peft_config=adapter)
    assert trainer.config.get("actor_rollout_ref.model.tokenizer_path") is None
    assert (trainer.config.get("actor_rollout_ref.model.lora_rank"), trainer.train()["steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generation": 4}, "did you mean num_generations"),
        ({"repetition_penalty": 1.1}, r"reward\.repetition_penalty"),
        ({"loss_type": "vespo"}, "expected one of"),
        ({"sync_ref_model": True}, "the reference is fixed"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(here, fields, message):
    with pytest.raises(ConfigErrors, match=message):
        GRPOTrainer(MODELS[0], even, GRPOConfig(**fields), ROWS)


def test_arguments_that_are_not_supported(here):
    with pytest.raises(TypeError, match="tools is not supported"):
        GRPOTrainer(MODELS[0], even, None, ROWS, tools=[print])
    with pytest.warns(UserWarning, match="callbacks has no effect"):
        GRPOTrainer(MODELS[0], even, None, ROWS, callbacks=[object()])


def test_rewards_under_trls_names():
    said = [
        [{"role": "assistant", "content": text}] for text in ("It is \\boxed{\\frac{1}{2}}", "3", "<think>a</think>b")
    ]
    assert accuracy_reward(said, solution=["0.5", "4", "b"])[:2] == [1.0, 0.0]
    assert think_format_reward(said) == [0.0, 0.0, 1.0]
