"""Errors that a client sees, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is refused or failed: its HTTP status, and a message that says what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_value(name: str, value: Any, expected: str) -> ApiError:
    """The error of a field with a wrong value."""
    return ApiError(400, f"{name}={value!r:.100}: expected {expected}", param=name)


def too_long(num_prompt: int, max_tokens: int, max_length: int) -> ApiError:
    """The error of a prompt and answer that exceed the model's length."""
    message = (
        f"this model's maximum context length is {max_length} tokens; the prompt has {num_prompt} and max_tokens is "
        f"{max_tokens}. Shorten the prompt or lower max_tokens"
    )
    return ApiError(400, message, param="max_tokens", code="context_length_exceeded")
