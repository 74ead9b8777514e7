"""The reward model: scores and gradients are those of transformers' classifier, however texts are packed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from gspo.models import ModelError
from gspo.models.load import load_reward_model, load_tokenizer
from gspo.training.critic import ValueModel
from gspo.training.model_reward import ModelScorer, Normalization, Rendering
from gspo.training.optim.adamw import MasterOptimizer, StepResult
from gspo.training.reward_model import (
    CENTER_COEF,
    Pair,
    RewardModel,
    RewardModelSettings,
    TrainedRewardModel,
    preference_metrics,
)
from gspo.training.schedule import Schedule
from gspo.types import Group, Prompt, Rollout, Turn
from tests.support.small_run import make_model
from tests.training.models import VOCAB, classifier

SIZES = (5, 30, 1, 12, 7, 7)


def make_texts(seed: int = 0) -> list[tuple[int, ...]]:
    numbers = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB, (size,), generator=numbers).tolist()) for size in SIZES]


def by_transformers(model: Any, texts: Sequence[tuple[int, ...]]) -> Tensor:
    """One text at a time through the classifier itself."""
    return torch.cat([model(input_ids=torch.tensor([text])).logits[0] for text in texts])


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
def test_scores_are_those_of_the_classifier(layout: Any, max_tokens: int) -> None:
    texts, want = make_texts(), by_transformers(classifier(), make_texts()).detach()
    model = RewardModel(ValueModel.of_classifier(classifier()), RewardModelSettings(max_tokens, layout))
    assert model.runner.kind == layout
    torch.testing.assert_close(model.scores(texts), want, rtol=1e-4, atol=1e-5)
    assert want.std() > 0.1


@pytest.mark.parametrize(("max_tokens", "forwards"), [(1, 6), (30, 3), (1000, 1)])
def test_texts_are_scored_in_forwards_within_the_budget(max_tokens: int, forwards: int) -> None:
    model = RewardModel(ValueModel.of_classifier(classifier()), RewardModelSettings(max_tokens, "packed"))
    sizes: list[int] = []
    model.scorer.decoder.layers[0].register_forward_hook(lambda module, args, out: sizes.append(args[0].shape[1]))
    model.scores(make_texts())
    assert sum(sizes) == sum(SIZES) and len(sizes) == forwards
    assert all(size <= max(max_tokens, max(SIZES)) for size in sizes)


class RecordingOptimizer(MasterOptimizer):
    """Keeps the summed gradients of each step."""

    def step(self, lr: float, loss: Tensor | None = None) -> StepResult:
        self.grads = {name: m.grad.double() for name, m in self.masters.items() if m.grad is not None}
        return super().step(lr, loss)


@pytest.mark.parametrize("max_tokens", [1, 50, 1000])
def test_the_gradient_is_that_of_the_bradley_terry_loss(max_tokens: int) -> None:
    texts = make_texts()
    pairs = [Pair(str(i), texts[2 * i], texts[2 * i + 1]) for i in range(3)]
    want = classifier()
    chosen, rejected = by_transformers(want, texts)[0::2], by_transformers(want, texts)[1::2]
    loss = (-F.logsigmoid(chosen - rejected) + CENTER_COEF * (chosen + rejected) ** 2).mean()
    loss.backward()

    got = classifier()
    optimizer = RecordingOptimizer(got.named_parameters(), lr=1e-3, weight_decay=0.0, grad_clip=1e9)
    model = TrainedRewardModel(got, optimizer, Schedule(1e-3), RewardModelSettings(max_tokens))
    metrics = model.update(pairs, step=0)
    assert metrics["train/loss"].result() == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["train/accuracy"].result() == pytest.approx(float((chosen > rejected).float().mean()))
    for name, parameter in want.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(optimizer.grads[name].float(), parameter.grad, rtol=1e-3, atol=1e-5)


class Lengths:
    """A reward model whose score is the number of tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def scores(self, texts: list[tuple[int, ...]]) -> Tensor:
        self.asked += texts
        return torch.tensor([float(len(text)) for text in texts])


PROMPT = Prompt("row", ({"role": "user", "content": "1+2="},), (9, 9, 9))  # tokens of the policy's tokenizer


def scored(scorer: ModelScorer, *rollouts: Rollout) -> list[Rollout]:
    scorer.submit(Group(PROMPT, rollouts, 0, 0))
    return list(scorer.collect()[0].rollouts)


def rollout(text: str, *turns: Turn) -> Rollout:
    return Rollout((), (), (), (), "stop", text=text, turns=turns)


def test_responses_are_rendered_with_the_models_own_template_and_equal_ones_are_scored_once() -> None:
    tokenizer, model = load_tokenizer("embedded"), Lengths()
    scorer = ModelScorer(model, Rendering(tokenizer), Normalization())
    done = scored(scorer, rollout("3"), rollout("31"), rollout("3"))
    assert [tokenizer.decode(text) for text in model.asked] == [
        "<user>1+2=<assistant>3<eos>",
        "<user>1+2=<assistant>31<eos>",
    ]
    assert [r.reward.score for r in done if r.reward] == [8.0, 9.0, 8.0]


def test_earlier_turns_are_part_of_the_conversation() -> None:
    tokenizer, model = load_tokenizer("embedded"), Lengths()
    scorer = ModelScorer(model, Rendering(tokenizer), Normalization())
    scored(scorer, rollout("5", Turn(0, 0, "4", observation="higher\n"), Turn(0, 0, "5")))
    assert tokenizer.decode(model.asked[0]) == "<user>1+2=<assistant>4<eos><user>higher\n<assistant>5<eos>"


def test_a_response_that_the_model_cannot_read_has_no_reward() -> None:
    scorer = ModelScorer(Lengths(), Rendering(load_tokenizer("embedded"), max_length=8), Normalization())
    short, long = scored(scorer, rollout("3"), rollout("31"))
    assert short.reward is not None and long.reward is None
    assert long.failure == "row: is 9 tokens for the reward model, which reads at most 8"


def test_normalisations() -> None:
    assert Normalization("saved", mean=2.0, std=4.0).apply(10.0) == 2.0
    assert Normalization("sigmoid").apply(0.0) == 0.5
    assert Normalization("sigmoid").apply(-800.0) == 0.0 and Normalization("sigmoid").apply(800.0) == 1.0
    assert Normalization().apply(-3.0) == -3.0


def test_a_decoder_without_a_score_is_no_reward_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "decoder")
    with pytest.raises(ModelError, match="is no reward model: its weights have no score"):
        load_reward_model(str(folder))
    fresh = load_reward_model(str(folder), new_head=True)
    assert not fresh.score.weight.any()
    fresh.score.weight.data.fill_(0.5)
    fresh.save_pretrained(tmp_path / "classifier")
    again = load_reward_model(str(tmp_path / "classifier"))
    assert bool((again.score.weight == 0.5).all())
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").config.num_labels == 1


def test_equal_scores_are_not_in_the_right_order():
    found = preference_metrics("val", torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, -1.0, 0.5]))
    assert found["val/accuracy"].result() == pytest.approx(1 / 3)


def test_metrics_of_pairs_by_hand():
    found = preference_metrics("val", torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, -1.0, 0.5]))
    assert found["val/margin"].result() == pytest.approx((0.0 + 3.0 - 1.5) / 3)
    assert found["val/sign_accuracy"].result() == pytest.approx((0.5 + 1.0 + 0.0) / 3)  # chosen above 0, rejected below
    losses = (0.693147 + 0.04, 0.048587 + 0.01, 1.701413 + 0.0025)  # -log σ of the margin, and 0.01 of the squared sum
    assert found["val/loss"].result() == pytest.approx(sum(losses) / 3, abs=1e-5)
    assert set(found) == {"val/margin", "val/sign_accuracy", "val/loss", "val/accuracy"}


def test_held_out_pairs_are_scored_in_their_order():
    texts = make_texts()
    pairs = [Pair(str(i), texts[2 * i], texts[2 * i + 1]) for i in range(3)]
    reward_model = classifier()
    optimizer = MasterOptimizer(reward_model.named_parameters(), lr=1e-3, weight_decay=0.0, grad_clip=1.0)
    trained = TrainedRewardModel(reward_model, optimizer, Schedule(1e-3), RewardModelSettings(50))
    metrics, scores = trained.evaluate(pairs)
    expected = by_transformers(classifier(), texts)[:6].detach().view(3, 2)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert metrics["val/margin"].result() == pytest.approx(float((expected[:, 0] - expected[:, 1]).mean()), abs=1e-5)


def trained_model(max_tokens: int = 1000, schedule: Schedule | None = None) -> TrainedRewardModel:
    model = classifier()
    optimizer = RecordingOptimizer(model.named_parameters(), lr=1.0, weight_decay=0.0, grad_clip=None)
    return TrainedRewardModel(model, optimizer, schedule or Schedule(1e-3), RewardModelSettings(max_tokens))


def test_whole_pairs_share_a_forward_up_to_the_budget() -> None:
    """Pairs of 35, 13 and 14 tokens; one that is longer than the budget is alone."""
    texts, model = make_texts(), trained_model()
    pairs = [Pair(str(i), texts[2 * i], texts[2 * i + 1]) for i in range(3)]
    for max_tokens, wanted in (
        (62, [[0, 1, 2, 3, 4, 5]]),
        (61, [[0, 1, 2, 3], [4, 5]]),
        (48, [[0, 1, 2, 3], [4, 5]]),
        (47, [[0, 1], [2, 3, 4, 5]]),
        (27, [[0, 1], [2, 3, 4, 5]]),
        (26, [[0, 1], [2, 3], [4, 5]]),
    ):
        model.settings = RewardModelSettings(max_tokens)
        assert model._pairs_within_budget(pairs) == wanted, max_tokens


def test_a_step_on_pairs_reports_its_rate_and_norm_and_a_bad_one_only_that_it_was_skipped() -> None:
    texts, model = make_texts(), trained_model(schedule=Schedule(0.5, "linear", 0, 4))
    pairs = [Pair("a", texts[0], texts[1])]
    found = model.update(pairs, step=1)
    norm = sum(float(g.square().sum()) for g in model.optimizer.grads.values()) ** 0.5
    assert found["actor/lr"].result() == 0.375 and found["actor/skipped_updates"].result() == 0
    assert found["actor/grad_norm"].result() == pytest.approx(norm, rel=1e-4)
    assert {"train/loss", "train/accuracy", "train/margin", "train/sign_accuracy"} <= set(found)
    model.model.score.weight.data.fill_(float("nan"))
    bad = model.update(pairs, step=2)
    assert bad["actor/skipped_updates"].result() == 1 and "actor/grad_norm" not in bad
    assert bad["actor/lr"].result() == 0.25


def test_dropout_is_off_and_each_update_begins_without_the_gradients_of_the_last() -> None:
    """Three updates of pairs in several forwards, against plain AdamW on the classifier itself."""
    texts, got, plain = make_texts(), classifier(attention_dropout=0.9).train(), classifier()
    pairs = [Pair(str(i), texts[2 * i], texts[2 * i + 1]) for i in range(3)]
    schedule, settings = Schedule(1e-2, "linear", 0, 4), {"eps": 1e-2, "weight_decay": 0.1}
    optimizer = MasterOptimizer(got.named_parameters(), lr=1.0, grad_clip=0.5, **settings)
    model = TrainedRewardModel(got, optimizer, schedule, RewardModelSettings(20))
    adamw = torch.optim.AdamW(plain.parameters(), lr=1.0, **settings)
    for step in range(3):
        some = pairs[: 3 - step]
        metrics = model.update(some, step=step)
        chosen, rejected = (by_transformers(plain, texts[i : 2 * len(some) : 2]) for i in (0, 1))
        losses = -F.logsigmoid(chosen - rejected) + CENTER_COEF * (chosen + rejected) ** 2
        adamw.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = schedule.at(step)
        adamw.step()
        assert metrics["train/loss"].result() == pytest.approx(float(losses.mean().detach()), rel=1e-3)
        assert metrics["train/margin"].result() == pytest.approx(float((chosen - rejected).mean().detach()), abs=1e-3)
        assert metrics["train/loss"].weight == len(some)
    for (name, a), b in zip(got.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)
    torch.testing.assert_close(model.scores(texts), by_transformers(plain, texts).detach(), rtol=1e-3, atol=1e-3)


def test_pairs_in_several_forwards_are_summed_in_half_precision() -> None:
    texts, model = make_texts(), classifier(num_hidden_layers=1).bfloat16()
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3)
    trained = TrainedRewardModel(model, optimizer, Schedule(1e-3), RewardModelSettings(1))
    pairs = [Pair(str(i), texts[2 * i], texts[2 * i + 1]) for i in range(3)]
    assert trained.update(pairs, step=0)["actor/skipped_updates"].result() == 0


class Numbers:
    """A reward model with a score for each response, in the order in which it is asked."""

    def __init__(self, *scores: float) -> None:
        self.left = list(scores)

    def scores(self, texts: list[tuple[int, ...]]) -> Tensor:
        return torch.tensor([self.left.pop(0) for _ in texts])


def test_scores_are_normalised_and_those_that_are_not_finite_fail() -> None:
    model = Numbers(3.0, float("nan"), float("-inf"), -1.0)
    scorer = ModelScorer(model, Rendering(load_tokenizer("embedded")), Normalization("saved", mean=1.0, std=4.0))
    done = scored(scorer, *(rollout(text) for text in ("1", "2", "3", "4")))
    assert [None if r.reward is None else r.reward.score for r in done] == [0.5, None, None, -0.5]
    assert [r.failure for r in done][1:3] == ["the reward model's score is nan", "the reward model's score is -inf"]
    assert done[0].failure is None


def test_groups_are_collected_in_order_and_those_that_are_left_wait() -> None:
    scorer = ModelScorer(Lengths(), Rendering(load_tokenizer("embedded")), Normalization())
    for number in range(4):
        scorer.submit(Group(PROMPT, (rollout("3" * (number + 1)),), number, 0))
    assert [[g.submission for g in scorer.collect(num)] for num in (1, 0, 2)] == [[0], [], [1, 2]]
    (last,) = scorer.collect()
    assert last.submission == 3 and last.rollouts[0].reward is not None and last.rollouts[0].reward.score == 11.0
    assert scorer.collect() == []
    scorer.submit(Group(PROMPT, (rollout("3"),), 9, 0))
    scorer.close()
    assert scorer.collect() == []


def test_a_turn_without_an_observation_adds_no_message() -> None:
    tokenizer, model = load_tokenizer("embedded"), Lengths()
    turns = (Turn(0, 0, "4", observation="higher"), Turn(0, 0, "6"), Turn(0, 0, "not read"))
    scored(ModelScorer(model, Rendering(tokenizer), Normalization()), rollout("5", *turns))
    want = "<user>1+2=<assistant>4<eos><user>higher<assistant>6<eos><assistant>5<eos>"
    assert tokenizer.decode(model.asked[0]) == want


def test_a_sigmoid_is_the_same_on_both_sides_of_0() -> None:
    for score in (0.5, 2.0):
        up, down = (Normalization("sigmoid").apply(sign * score) for sign in (1, -1))
        assert up == pytest.approx(float(torch.sigmoid(torch.tensor(score).double()))) and up + down == pytest.approx(1)
    assert Normalization("sigmoid", mean=5.0, std=9.0).apply(0.0) == 0.5  # which reads neither number
