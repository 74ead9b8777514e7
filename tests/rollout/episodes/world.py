"""A character tokenizer for the small models of tests, environments that run in worker processes, and engines over both."""

from __future__ import annotations

import os
import time
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo.data.chat_append import ChatAppender
from gspo.environments.formats import FORMATS, ToolFormat
from gspo.environments.loading import EnvironmentSpec
from gspo.environments.pool import EpisodePool, open_pool
from gspo.environments.protocol import Action, Step
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.episodes.dialogue import Dialogue, DialogueSettings
from gspo.rollout.episodes.engine import Episodes
from gspo.types import Prompt
from tests.rollout.models import EOS, PAD, VOCAB

ENDS = (EOS, 10, 20, 30, 40, 50)  # tokens that end a turn: a random model writes one soon
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>/=+-*;:?!.,_ \n()[]{}'\"|"


def make_tokenizer() -> Any:
    """One token per character, ids as many as the small models have."""
    vocab = {"<pad>": PAD, "<eos>": EOS, "<bos>": 2} | {c: 3 + i for i, c in enumerate(CHARACTERS[: VOCAB - 3])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


class Echo:
    """Says how long each turn was; the reward is a share of it; over after `num_turns`."""

    tools = ()

    def __init__(self, num_turns: int = 3) -> None:
        self._num_turns = num_turns

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self._turn, self._seed = 0, seed
        return ()

    def step(self, action: Action) -> Step:
        assert action.turn == self._turn, "an episode must be played in order"
        self._turn += 1
        message = {"role": "user", "content": f"{len(action)}.{self._seed % 10}"}
        return Step((message,), len(action) / 8, self._turn == self._num_turns, metrics={"size": len(action)})

    def close(self) -> None: ...


class Opening(Echo):
    """As Echo, with a first message that depends on the seed."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        super().reset(prompt, seed)
        return ({"role": "user", "content": f"go {seed % 100}"},)


class Unsteady(Echo):
    """Answers with the process that it runs in: played again elsewhere, it does not repeat itself."""

    def step(self, action: Action) -> Step:
        step = super().step(action)
        return Step(({"role": "user", "content": str(os.getpid())},), step.reward, step.done)


class Faulty(Echo):
    """Fails in the way that `how` names, on the turn with number `turn` of rows whose number is odd."""

    def __init__(self, how: str = "raise", turn: int = 1, every: int = 2) -> None:
        super().__init__()
        self._how, self._bad_turn, self._every = how, turn, every

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self._is_bad = int(prompt.uid.strip("p")) % self._every == self._every - 1
        return super().reset(prompt, seed)

    def step(self, action: Action) -> Step:
        step = super().step(action)
        if not self._is_bad or action.turn != self._bad_turn:
            return step
        if self._how == "hang":
            time.sleep(3600)
        if self._how == "die":
            os._exit(3)
        if self._how == "nan":
            return Step(step.messages, float("nan"))
        if self._how == "flood":
            return Step(({"role": "user", "content": "x" * 10_000_000},), 0.5)
        if self._how == "silent":
            return Step()
        raise RuntimeError("the board is gone")


def make_pool(name: str = "Echo", *, timeout: float = 20.0, num_workers: int = 2, **kwargs: Any) -> EpisodePool:
    """Workers that play one of the environments above."""
    spec = EnvironmentSpec(name, path=__name__, kwargs=kwargs)
    return open_pool(
        spec, num_workers=num_workers, timeout=timeout, tool_timeout=5.0, memory=2048, retries=1, max_chars=4000
    )


def make_dialogue(tool_format: str | ToolFormat | None = None, **settings: Any) -> Dialogue:
    tokenizer = make_tokenizer()
    chosen = FORMATS[tool_format] if isinstance(tool_format, str) else tool_format
    return Dialogue(tokenizer, ChatAppender(tokenizer), chosen, DialogueSettings(**settings), ENDS)


def make_episodes(
    engine: RolloutEngine, pool: EpisodePool, *, lag: int = 1, opens: bool = False, **settings: Any
) -> Episodes:
    return Episodes(engine, pool, make_dialogue(**settings), max_length=128, lag=lag, opens=opens)
