"""A character tokenizer for the small models of tests, pools of environments, and engines over both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo.data.chat_append import ChatAppender
from gspo.environments.formats import FORMATS, ToolFormat
from gspo.environments.host import EpisodeHost, Job
from gspo.environments.loading import EnvironmentSpec
from gspo.environments.pool import EpisodePool, open_pool
from gspo.rewards.pool.worker_pool import JobFailed, PoolCounts
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.episodes.dialogue import Dialogue, DialogueSettings
from gspo.rollout.episodes.engine import Episodes
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from tests.rollout.models import EOS, PAD, VOCAB

ENDS = (EOS, 10, 20, 30, 50, 60)  # tokens that end a turn: a random model writes one soon
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789<>/=+-*;:?!.,_ \n()[]{}'\"|"


def make_tokenizer() -> Any:
    """One token per character, ids as many as the small models have."""
    vocab = {"<pad>": PAD, "<eos>": EOS, "<bos>": 2} | {c: 3 + i for i, c in enumerate(CHARACTERS[: VOCAB - 3])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def make_pool(name: str = "Echo", *, timeout: float = 20.0, num_workers: int = 2, **kwargs: Any) -> EpisodePool:
    """Workers that play one of `environments.py`."""
    spec = EnvironmentSpec(name, path="tests.rollout.episodes.environments", kwargs=kwargs)
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


def recite(texts: Sequence[str]) -> ScriptedEngine:
    """An engine that writes a text per turn, and some tokens after it that a stop would have cut."""
    tokenizer = make_tokenizer()

    def script(prompt: Any, submission: int, number: int) -> ScriptedAnswer:
        return ScriptedAnswer(())

    class Reciter(ScriptedEngine):
        def _recite(self, sequence: Any) -> None:
            begun = sequence.begun
            turn = (begun.loss_mask and sum(a > b for a, b in zip((0, *begun.loss_mask), begun.loss_mask))) or 0
            tokens = [*tokenizer(texts[turn])["input_ids"], ENDS[0]]
            sequence.finish(sequence.extended(tokens, [-1.0] * len(tokens), 0), "", "stop")

    return Reciter(script)


class LocalPool:
    """Plays episodes at once in this process, by the host that a worker runs."""

    def __init__(self, make: Callable[[], Any], max_chars: int = 4000) -> None:
        self._host = EpisodeHost(make, tool_timeout=5.0, max_chars=max_chars)
        self.counts = PoolCounts()
        self.jobs: list[Job] = []
        self.ended: list[Any] = []

    def play(self, job: Job) -> Future[Any]:
        self.jobs.append(job)
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._host(job))
        except Exception as error:
            answer.set_exception(JobFailed(str(error)))
        return answer

    def end(self, key: Any) -> None:
        self.ended.append(key)
        self._host(Job(key))

    def close(self) -> None: ...
