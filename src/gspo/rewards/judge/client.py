"""The client of an OpenAI-compatible server: one chat call with a deadline, retries, and limits per minute."""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.rewards.judge.cache import Reply
from gspo.rewards.judge.settings import JudgeSettings
from gspo.rewards.protocol import RewardError

RETRIED = (408, 409, 425, 429)  # and every 5xx
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts, doubled each time
LONGEST_RETRY_AFTER = 600.0
MAX_SHOWN = 500
NO_KEY = "none"  # servers on the own machine need no key, but the client insists on one


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
        self._key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        self._client: Any = None
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._requests = RateLimit(settings.requests_per_minute)
        self._tokens = RateLimit(settings.tokens_per_minute)
        self.num_calls = 0
        require_client()

    async def ask(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Reply:
        """The reply to a chat; JudgeFailure when every attempt failed."""
        wait, attempt = FIRST_WAIT, 0
        while True:
            try:
                async with self._slots:
                    await asyncio.sleep(self._requests.delay(1) + self._tokens.delay(0))
                    return await self._attempt(messages, sampling)
            except JudgeFailure as failure:
                if not failure.retry or attempt >= self._settings.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise JudgeFailure(f"{failure}{tries}", tokens=failure.tokens) from None
                await asyncio.sleep(wait if failure.wait is None else min(failure.wait, LONGEST_RETRY_AFTER))
                wait, attempt = min(2 * wait, LONGEST_WAIT), attempt + 1

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _attempt(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Reply:
        import openai

        s, start = self._settings, time.monotonic()
        if self._client is None:
            self._client = openai.AsyncOpenAI(base_url=s.base_url, api_key=self._key or NO_KEY, max_retries=0)
        self.num_calls += 1
        try:
            async with asyncio.timeout(s.timeout):
                response = await self._client.chat.completions.with_raw_response.create(
                    model=s.model, messages=list(messages), **sampling
                )
                body = response.http_response.json()
        except TimeoutError:
            raise JudgeFailure(f"no reply within reward.judge.timeout={s.timeout:g} s", retry=True) from None
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.APIConnectionError as error:
            cause = f"{type(error.__cause__ or error).__name__}: {error.__cause__ or error}"
            raise JudgeFailure(self.hide(f"{s.base_url} cannot be reached: {cause}"), retry=True) from None
        except (openai.OpenAIError, ValueError) as error:
            raise JudgeFailure(self.hide(f"the reply is not that of a chat: {error}"[:MAX_SHOWN])) from None
        return self._read(body, time.monotonic() - start)

    def _refused(self, error: Any) -> JudgeFailure:
        """What a status of 400 and above means."""
        status, headers = error.status_code, error.response.headers
        text = self.hide(f"HTTP {status}: {error.response.text.strip()[:MAX_SHOWN]}")
        return JudgeFailure(
            text, retry=status in RETRIED or status >= 500, wait=retry_after(headers.get("retry-after"))
        )

    def _read(self, body: Any, seconds: float) -> Reply:
        try:
            choice = body["choices"][0]
            message, usage = choice["message"], body.get("usage") or {}
            tokens = int(usage.get("total_tokens") or 0)
            text, refusal = message.get("content"), message.get("refusal")
        except (LookupError, TypeError, ValueError, AttributeError):
            raise JudgeFailure(self.hide(f"the reply is not that of a chat: {str(body)[:MAX_SHOWN]}")) from None
        self._tokens.use(tokens)
        if refusal or choice.get("finish_reason") == "content_filter":
            said = refusal or "finish_reason content_filter"
            raise JudgeFailure(self.hide(f"the judge refused: {str(said)[:MAX_SHOWN]}"), tokens=tokens)
        if not isinstance(text, str):
            raise JudgeFailure("the reply has no text", tokens=tokens)
        return Reply(self.hide(text), tokens, round(seconds, 3))

    def hide(self, text: str) -> str:
        """The text without the key, which a server may repeat."""
        return text.replace(self._key, "***") if self._key else text


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
