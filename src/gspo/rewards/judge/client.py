"""The client of an OpenAI-compatible server: one chat call with a deadline, retries, and limits per minute."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.data.rows import visible
from gspo.rewards.judge.cache import Reply
from gspo.rewards.judge.settings import JudgeSettings
from gspo.rewards.protocol import RewardError

RETRIED = (408, 409, 425, 429)  # and every 5xx
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts, doubled each time
LONGEST_RETRY_AFTER = 600.0
CONNECT_SECONDS = 5.0  # for a connection, within the time of an attempt
MAX_BYTES = 8 * 2**20  # of a reply
MAX_SHOWN = 500
MAX_TOKENS = 10**9  # of one call: more is no count of tokens
NO_KEY = "none"  # servers on the own machine need no key, but the client insists on one
SHORTEST_SECRET = 8  # shorter keys are placeholders, such as EMPTY, which may be words of a reply


class JudgeFailure(Exception):
    """A call that gave no reply. `retry` says whether another attempt may help, after `wait` seconds if that is known."""

    def __init__(self, text: str, *, retry: bool = False, wait: float | None = None, tokens: int = 0) -> None:
        super().__init__(text)
        self.retry, self.wait, self.tokens = retry, wait, tokens


class RateLimit:
    """Spreads calls over time: `limit` units per minute, 0 = no limit."""

    def __init__(self, limit: float) -> None:
        self._seconds = 60 / limit if limit else 0.0
        self._free = 0.0  # when the next call may start

    def delay(self, units: float) -> float:
        """Seconds until a call may start; it uses `units`."""
        now = time.monotonic()
        start = max(now, self._free)
        self._free = start + units * self._seconds
        return start - now

    def use(self, units: float) -> None:
        """Count units that a call has used."""
        self._free = max(time.monotonic(), self._free) + units * self._seconds


class ChatClient:
    """Asks one server. All calls run in the event loop that `ask` is awaited in."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._key = read_key(settings.api_key_env)
        self._client: Any = None
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._requests = RateLimit(settings.requests_per_minute)
        self._tokens = RateLimit(settings.tokens_per_minute)
        self._replies, self._replied = 0, 0  # calls with a reply, and their tokens
        self.num_calls = 0
        require_client()

    async def ask(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Reply:
        """The reply to a chat; JudgeFailure when every attempt failed."""
        wait, attempt = FIRST_WAIT, 0
        while True:
            try:
                async with self._slots:
                    return await self._limited(messages, sampling)
            except JudgeFailure as failure:
                if not failure.retry or attempt >= self._settings.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise JudgeFailure(f"{failure}{tries}", tokens=failure.tokens) from None
                await asyncio.sleep(wait if failure.wait is None else min(failure.wait, LONGEST_RETRY_AFTER))
                wait, attempt = min(2 * wait, LONGEST_WAIT), attempt + 1

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _limited(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Reply:
        """One attempt, when the limits per minute allow it. Its tokens are estimated until the reply says them."""
        expected, used = self._expected_tokens(messages), 0
        await asyncio.sleep(max(self._requests.delay(1), self._tokens.delay(expected)))
        try:
            reply = await self._attempt(messages, sampling)
            used = reply.tokens
            self._replies, self._replied = self._replies + 1, self._replied + used
            return reply
        except JudgeFailure as failure:
            used = failure.tokens
            raise
        finally:
            self._tokens.use(used - expected)

    def _expected_tokens(self, messages: Sequence[Mapping[str, str]]) -> float:
        """The tokens of a call: the mean of those before, or, of the first ones, a quarter of their characters."""
        if self._replies:
            return self._replied / self._replies
        return sum(len(message["content"]) for message in messages) / 4

    async def _attempt(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Reply:
        import openai

        s, start = self._settings, time.monotonic()
        self.num_calls += 1
        try:
            async with asyncio.timeout(s.timeout):
                body = await self._body(messages, sampling)
        except TimeoutError:
            raise JudgeFailure(f"no reply within reward.judge.timeout={s.timeout:g} s", retry=True) from None
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except JudgeFailure:
            raise
        except Exception as error:  # whatever a server does, it costs a reward and not the run
            cause = self._shown(f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}")
            raise JudgeFailure(f"{s.base_url} cannot be reached: {cause}", retry=True) from None
        return self._read(body, time.monotonic() - start)

    async def _body(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Any:
        """What the server sends, read as JSON."""
        import openai

        s = self._settings
        if self._client is None:
            limits = openai.Timeout(None, connect=CONNECT_SECONDS)  # the deadline is that of the attempt
            key = self._key or NO_KEY
            self._client = openai.AsyncOpenAI(base_url=s.base_url, api_key=key, max_retries=0, timeout=limits)
        create = self._client.chat.completions.with_streaming_response.create
        data = bytearray()
        async with create(model=s.model, messages=list(messages), **sampling) as response:
            async for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_BYTES:
                    raise JudgeFailure(f"the reply is larger than {MAX_BYTES >> 20} MiB")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._no_chat(error) from None

    def _refused(self, error: Any) -> JudgeFailure:
        """What a status of 400 and above means."""
        status, headers = error.status_code, error.response.headers
        text = f"HTTP {status}: {self._shown(error.response.text.strip())}"
        return JudgeFailure(
            text, retry=status in RETRIED or status >= 500, wait=retry_after(headers.get("retry-after"))
        )

    def _read(self, body: Any, seconds: float) -> Reply:
        try:
            choice = body["choices"][0]
            message, usage = choice["message"], body.get("usage") or {}
            tokens = int(usage.get("total_tokens") or 0)
            text, refusal = message.get("content"), message.get("refusal")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise self._no_chat(body) from None
        if not 0 <= tokens <= MAX_TOKENS:
            raise self._no_chat(body)
        ended = choice.get("finish_reason")
        if refusal or ended == "content_filter":
            said = refusal or "finish_reason content_filter"
            raise JudgeFailure(f"the judge refused: {self._shown(said)}", tokens=tokens)
        if not isinstance(text, str):
            raise JudgeFailure("the reply has no text", tokens=tokens)
        if ended == "length" and text.rfind("}") <= text.rfind("{"):  # 1 may be the beginning of 10
            limit = f"reward.judge.max_tokens={self._settings.max_tokens}"
            raise JudgeFailure(f"the reply was cut at {limit}: {self._shown(text)}", tokens=tokens)
        return Reply(self.hide(text), tokens, round(seconds, 3))

    def _no_chat(self, why: Any) -> JudgeFailure:
        return JudgeFailure(f"the reply is not that of a chat: {self._shown(why)}")

    def _shown(self, value: Any) -> str:
        """The beginning of a text, as a failure shows it. What is hidden is hidden before the text is cut."""
        try:
            return visible(self.hide(str(value))[:MAX_SHOWN])
        except RecursionError:
            return "(too many brackets to show)"

    def hide(self, text: str) -> str:
        """The text without the key, which a server may repeat, and without what no file can hold."""
        text = text.encode(errors="replace").decode()
        return text.replace(self._key, "***") if len(self._key) >= SHORTEST_SECRET else text


def read_key(variable: str) -> str:
    """The key in an environment variable, "" without one; RewardError where no header could carry it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if not (key.isascii() and key.isprintable()):
        raise RewardError(
            f"the variable {variable} (reward.judge.api_key_env) is no key: it has a line break or a character beyond "
            "ASCII; set it to the key alone"
        )
    return key


def require_client() -> None:
    """RewardError says what to install where the client is missing."""
    try:
        import openai  # noqa: F401
    except ImportError:
        raise RewardError("a judge needs the openai client; pip install 'gspo[judge]'") from None


def retry_after(value: str | None) -> float | None:
    """The seconds of a Retry-After header: a number, or the time from now to a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
