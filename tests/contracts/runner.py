"""What every Runner must do. A test class derives from RunnerContract and gives it a fixture `runner`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from gspo.rollout.counter_noise import sequence_key
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.runner import Runner
from gspo.rollout.native.slots import SlotStart
from tests.rollout.models import VOCAB, make_model

NUM_SLOTS, MAX_LENGTH = 6, 64
GREEDY = SamplingParams(max_tokens=MAX_LENGTH, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=MAX_LENGTH)
# One token (nothing to prefill), less than a page, several pages.
PROMPTS = [(7,), (5, 9, 11, 13), tuple(3 + i * 7 % 50 for i in range(35))]


@cache
def model() -> Any:
    return make_model()


def greedy(prompt: Sequence[int], num: int) -> list[int]:
    """The model's own greedy continuation."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num):
            ids.append(int(model()(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def start(prompt: Sequence[int], key: int = 0, max_tokens: int = 20, stops: tuple[int, ...] = ()) -> SlotStart:
    first = len(prompt) - 1
    return SlotStart(prompt[-1], first, first, first + max_tokens - 1, sequence_key(1, 0, key), stops)


def drawn(runner: Runner, row: int, prompt: Sequence[int]) -> list[int]:
    """The tokens that a row has drawn."""
    first, end = len(prompt) - 1, int(runner.slots.length[row])
    return runner.slots.tokens[row, first:end].tolist()


def place(runner: Runner, prompts: list[tuple[int, ...]], params: SamplingParams = GREEDY) -> None:
    """Append a row for each prompt, with one prefill of the distinct ones."""
    contexts = list(dict.fromkeys(prompts))
    with runner.running():
        prefixes = dict(zip(contexts, runner.prefill([prompt[:-1] for prompt in contexts])))
        starts = [start(prompt, key) for key, prompt in enumerate(prompts)]
        runner.place([prefixes[prompt] for prompt in prompts], starts, [params] * len(prompts))
        release(runner, prefixes.values())


def release(runner: Runner, prefixes: Iterable[Any]) -> None:
    for prefix in prefixes:
        runner.release(prefix)


def decode(runner: Runner, num_steps: int) -> None:
    with runner.running():
        assert runner.reserve(num_steps)
        with runner.decoding():
            for _ in range(num_steps):
                runner.decode()


class RunnerContract:
    """`runner` has NUM_SLOTS slots of MAX_LENGTH tokens over `model()`."""

    @pytest.fixture(autouse=True)
    def nothing_held(self, runner: Runner) -> Any:
        yield
        runner.clear()
        assert runner.pages.num_free == runner.pages.num_pages, "a page was lost"

    def test_greedy_rows_draw_the_models_own_tokens(self, runner: Runner) -> None:
        prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[2], PROMPTS[1]]
        place(runner, prompts)
        decode(runner, 12)
        assert [drawn(runner, row, p) for row, p in enumerate(prompts)] == [greedy(p, 12) for p in prompts]

    def test_log_probs_are_those_of_the_model(self, runner: Runner) -> None:
        prompt = PROMPTS[1]
        place(runner, [prompt], SAMPLED)
        decode(runner, 9)
        ids = torch.tensor([[*prompt, *drawn(runner, 0, prompt)]])
        with torch.no_grad():
            logits = model()(ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        got = runner.slots.log_probs[0, len(prompt) - 1 : ids.shape[1] - 1]
        assert torch.allclose(got, expected, atol=1e-4)

    def test_draws_follow_the_key_of_the_row(self, runner: Runner) -> None:
        prompt = PROMPTS[1]
        place(runner, [prompt] * 3, SAMPLED)
        decode(runner, 12)
        first = [drawn(runner, row, prompt) for row in range(3)]
        assert len({tuple(tokens) for tokens in first}) == 3
        runner.clear()
        place(runner, [prompt] * 3, SAMPLED)
        decode(runner, 12)
        assert [drawn(runner, row, prompt) for row in range(3)] == first

    def test_a_row_is_done_at_its_stop_token_or_its_limit_and_does_not_advance(self, runner: Runner) -> None:
        prompt = PROMPTS[1]
        tokens = greedy(prompt, 10)
        stop = tokens[4]
        num = tokens.index(stop) + 1
        starts = [start(prompt, 0, 20, (VOCAB + 1, stop)), start(prompt, 1, 3)]
        with runner.running():
            (prefix,) = runner.prefill([prompt[:-1]])
            runner.place([prefix] * 2, starts, [GREEDY] * 2)
            runner.release(prefix)
        decode(runner, 10)
        assert runner.slots.done[:2].tolist() == [True, True]
        assert [drawn(runner, row, prompt) for row in range(2)] == [tokens[:num], tokens[:3]]

    def test_rows_go_on_after_others_were_removed_and_appended(self, runner: Runner) -> None:
        place(runner, [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1]])
        decode(runner, 3)
        runner.remove([0, 1], [(0, 2), (1, 3)])
        place(runner, [PROMPTS[0]])
        decode(runner, 5)
        expected = [greedy(PROMPTS[2], 8), greedy(PROMPTS[1], 8), greedy(PROMPTS[0], 5)]
        assert [drawn(runner, row, p) for row, p in enumerate([PROMPTS[2], PROMPTS[1], PROMPTS[0]])] == expected

    def test_a_kept_context_serves_rows_that_are_placed_later(self, runner: Runner) -> None:
        contexts = [PROMPTS[1][:-1], PROMPTS[2][:-1]]
        with runner.running():
            prefixes = runner.prefill(contexts)
            runner.place([prefixes[1]], [start(PROMPTS[2])], [GREEDY])
            kept = [runner.keep(prefix) for prefix in prefixes]
        decode(runner, 4)
        with runner.running():
            starts = [start(PROMPTS[2]), start(PROMPTS[1]), start(PROMPTS[2])]
            runner.place([kept[1], kept[0], kept[1]], starts, [GREEDY] * 3)
            release(runner, kept)
        decode(runner, 6)
        expected = greedy(PROMPTS[2], 10)
        assert drawn(runner, 0, PROMPTS[2]) == expected
        assert drawn(runner, 1, PROMPTS[2]) == drawn(runner, 3, PROMPTS[2]) == expected[:6]
        assert drawn(runner, 2, PROMPTS[1]) == greedy(PROMPTS[1], 6)

    def test_rows_with_different_parameters_are_drawn_together(self, runner: Runner) -> None:
        prompt = PROMPTS[1]
        with runner.running():
            (prefix,) = runner.prefill([prompt[:-1]])
            runner.place([prefix] * 2, [start(prompt, key) for key in (0, 1)], [SAMPLED, GREEDY])
            runner.release(prefix)
        decode(runner, 8)
        assert drawn(runner, 1, prompt) == greedy(prompt, 8)

    def test_memory_for_as_many_rows_as_slots_is_there(self, runner: Runner) -> None:
        with runner.running():
            assert runner.num_fitting([len(p) - 1 for p in PROMPTS] + [0] * 3) == NUM_SLOTS

    def test_what_is_read_is_what_rows_had_at_the_mark(self, runner: Runner) -> None:
        prompt, slots = PROMPTS[1], runner.slots
        place(runner, [prompt, PROMPTS[2]])
        assert slots.finished() == []
        decode(runner, 3)
        slots.mark(2)
        decode(runner, 20)
        lengths, tokens, log_probs = slots.read([1, 0])
        assert lengths == [len(PROMPTS[2]) + 2, len(prompt) + 2] and slots.finished() == []
        assert tokens[1, len(prompt) - 1 : lengths[1]].tolist() == greedy(prompt, 3)
        assert log_probs.shape == tokens.shape and (log_probs[1, len(prompt) - 1 : lengths[1]] < 0).all()
        slots.mark(2)
        assert slots.finished() == [0, 1]
        slots.forget_mark()
        assert slots.finished() == []
