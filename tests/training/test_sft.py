"""The warm start: the loss is on answers only, splits do not matter, and the same run gives the same bits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from gspo.data.datasets import load_rows
from gspo.data.rows import DataError, Row, user_message
from gspo.models.load import load_model, load_tokenizer
from gspo.models.output_head import Head
from gspo.training.sft import ProgressLine, SftConfig, SftStep, answer_log_probs, encode_examples, train_sft


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("embedded")


def tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=261,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def test_the_loss_is_cross_entropy_of_answer_tokens_and_eos(tokenizer: Any) -> None:
    model, rows = tiny(), load_rows("arithmetic", limit=6)
    examples = encode_examples(rows, tokenizer, max_length=64)
    ours = -answer_log_probs(model, Head.of(model), examples)
    expected = []
    for row, example in zip(rows, examples):
        text = f"<user>{row.messages[0]['content']}<assistant>{row.answer}<eos>"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[0, : len(example.prompt.token_ids)] = -100
        logits = model(input_ids=ids).logits[0, :-1]
        expected.append(F.cross_entropy(logits, labels[0, 1:], reduction="none", ignore_index=-100))
    wanted = torch.cat(expected)
    torch.testing.assert_close(ours, wanted[wanted != 0], atol=2e-6, rtol=1e-5)


def test_one_step_moves_by_the_gradient_of_the_mean(tokenizer: Any) -> None:
    """With warm-up over and no decay, AdamW's first step is lr * sign(gradient of the mean token loss)."""
    examples = encode_examples(load_rows("arithmetic", limit=4), tokenizer, max_length=64)
    model, reference = tiny(), tiny()
    loss = -answer_log_probs(reference, Head.of(reference), examples).mean()
    loss.backward()
    cfg = SftConfig(steps=1, lr=1e-3, batch_size=4, weight_decay=0.0, grad_clip=1e9)
    (step,) = train_sft(model, examples, cfg)
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    for new, old in zip(model.parameters(), reference.parameters()):
        assert old.grad is not None
        sure = old.grad.abs() > 1e-5
        moved = (new - old)[sure]
        torch.testing.assert_close(moved, -1e-3 * old.grad[sure].sign(), atol=2e-6, rtol=2e-3)


def test_micro_batches_do_not_change_the_result(tokenizer: Any) -> None:
    examples = encode_examples(load_rows("arithmetic", limit=32), tokenizer, max_length=64)
    whole, split = tiny(), tiny()
    a = train_sft(whole, examples, SftConfig(steps=3, batch_size=16, max_tokens_per_micro_batch=10_000))
    b = train_sft(split, examples, SftConfig(steps=3, batch_size=16, max_tokens_per_micro_batch=60))
    assert [s.loss for s in a] == pytest.approx([s.loss for s in b], rel=1e-4)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tokenizer: Any) -> None:
    examples = encode_examples(load_rows("arithmetic", limit=64), tokenizer, max_length=64)
    models = [tiny() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1)):
        train_sft(model, examples, SftConfig(steps=4, batch_size=8, seed=seed))
    first, second, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_it_learns(tokenizer: Any) -> None:
    rows = [Row(str(i), user_message(f"{i}?"), answer="yes" if i % 2 else "no") for i in range(8)]
    model = tiny()
    history = train_sft(
        model, encode_examples(rows, tokenizer, max_length=64), SftConfig(steps=80, lr=1e-2, batch_size=8)
    )
    assert history[0].loss > 4.0
    assert history[-1].loss < 0.1
    ids = tokenizer("<user>3?<assistant>", return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(out[0]) == "<user>3?<assistant>yes<eos>"


def test_learning_rates_warm_up_and_fall(tokenizer: Any) -> None:
    examples = encode_examples(load_rows("arithmetic", limit=4), tokenizer, max_length=64)
    cfg = SftConfig(steps=20, lr=1e-3, batch_size=1, warmup_steps=5, min_lr_ratio=0.1)
    rates = [s.lr for s in train_sft(tiny(), examples, cfg)]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))
    assert 1e-4 <= rates[-1] < 1.2e-4


def test_rows_that_cannot_be_imitated_are_named(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="r1: field 'answer' is missing"):
        encode_examples([Row("r1", user_message("x"))], tokenizer, max_length=9)
    with pytest.raises(DataError, match=r"r2: field 'answer' is 14 tokens.*at most 9"):
        encode_examples([Row("r2", user_message("x"), answer="0123456789")], tokenizer, max_length=9)
    with pytest.raises(ValueError, match="lr is 0"):
        SftConfig(lr=0.0)


def test_progress_line_says_what_is_left() -> None:
    times = iter([0.0, 0.5, 2.0, 2.1])
    lines: list[str] = []
    progress = ProgressLine(4, lines.append, clock=lambda: next(times))
    for i in range(2):
        progress(SftStep(i, 1.5, 1.0, 1e-3, 10))
    assert len(lines) == 1
    assert lines[0].startswith("step 2/4  loss 1.5000")
    assert "10 answer tokens/s" in lines[0]
    assert lines[0].endswith("2 s left")


def test_the_command_trains_any_file_with_answers_and_saves_a_loadable_folder(tmp_path: Path) -> None:
    from gspo.commands.sft import app

    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"q": f"{i}+1=", "a": str(i + 1)}) + "\n" for i in range(8)))
    out = tmp_path / "out"
    words = ["--data", str(file), "--out", str(out), "--steps", "3", "--batch-size", "4", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--prompt-key", "q", "--answer-key", "a"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1].removeprefix("result: "))
    assert (summary["steps"], summary["num_examples"], summary["skipped_steps"]) == (3, 8, 0)
    trained, start = load_model(str(out)), load_model("embedded")
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters()))
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert "not an empty folder" in again.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nope"], "is not a dataset"),
        (["--model", "no_such_folder_or/name/x"], "cannot be loaded"),
        (["--dtype", "int8"], "float32 or bfloat16"),
        (["--lr", "-1"], "lr is -1"),
    ],
)
def test_bad_words_end_with_2(tmp_path: Path, words: list[str], message: str) -> None:
    from gspo.commands.sft import app

    result = CliRunner().invoke(app, ["--out", str(tmp_path / "o"), "--steps", "1", "--num-train-samples", "4", *words])
    assert result.exit_code == 2, result.output
    assert message in result.output
