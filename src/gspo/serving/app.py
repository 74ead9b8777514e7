"""The web application: routes, keys, errors, and from each request to its answer."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gspo.serving.backend import Backend, Client
from gspo.serving.connection import ClientGone, EventStream, Exchange, read_body
from gspo.serving.errors import ApiError, too_long
from gspo.serving.metrics import ServerMetrics
from gspo.serving.parameters import Ask, Fields, read_ask, read_json, read_num_top
from gspo.serving.prompts import Prompted, read_tools
from gspo.serving.wire.answer import Answer, TokenText
from gspo.serving.wire.chat import ChatAnswer
from gspo.serving.wire.completion import CompletionAnswer
from gspo.serving.wire.tokens import TokensAnswer

log = logging.getLogger(__name__)
COMPLETION_TOKENS = 16  # of a completion that does not say how many, as in OpenAI's API
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
Handler = Callable[[Request], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a server answers with, and its limits."""

    name: str
    backend: Backend
    token_text: TokenText
    max_length: int
    num_slots: int
    has_top: bool = True  # whether the engine reports the best tokens of a position
    max_body: int = 8 << 20
    any_model: bool = False  # whether a request may name any model
    is_local: bool = True  # bound to loopback: requests that name another host come from a web page


class Endpoints:
    """The handlers of the routes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._created = int(time.time())
        self.metrics = ServerMetrics()

    async def models(self, request: Request) -> Response:
        served = self._served
        model = {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "gspo",
            "max_model_len": served.max_length,
        }
        return as_json({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        if not self._served.backend.is_alive:
            raise ApiError(503, "the engine has ended", kind="server_error")
        return Response()

    async def show_metrics(self, request: Request) -> Response:
        backend = self._served.backend
        return PlainTextResponse(self.metrics.text(backend.counts, backend.num_open, self._served.num_slots))

    async def chat(self, request: Request) -> Any:
        client, fields = self._client(request), await self._fields(request)
        messages, options = fields.get("messages"), fields.get("chat_template_kwargs")
        tools = read_tools(fields.get("tools", []))
        if fields.choice("tool_choice", ("auto", "none")) == "none":
            tools = []
        log_probs = fields.boolean("logprobs")
        ask = self._read_ask(fields, read_num_top(fields, "top_logprobs"), log_probs, 0)
        prompt, found = client.reader.chat(messages, tools, options), client.reader.tool_format
        if tools and found.inline:
            ask = dataclasses.replace(ask, call_end=found.call_end)
        named = (self._served.name, self._within(ask, [prompt]), prompt, self._served.token_text)
        return await self._answer(request, client, ChatAnswer(*named, found))

    async def completions(self, request: Request) -> Any:
        client, fields = self._client(request), await self._fields(request)
        prompt = fields.get("prompt")
        wanted = fields.get("logprobs")
        num_top = read_num_top(fields, "logprobs")
        ask = self._read_ask(fields, num_top, wanted is not None, COMPLETION_TOKENS)
        prompts = client.reader.completions(prompt)
        named = (self._served.name, self._within(ask, prompts), prompts, self._served.token_text)
        return await self._answer(request, client, CompletionAnswer(*named))

    async def generate(self, request: Request) -> Any:
        client, fields = self._client(request), await self._fields(request)
        token_ids, inner = fields.get("token_ids"), fields.get("sampling_params", {})
        name = fields.get("request_id")
        stream = fields.boolean("stream")
        options = fields.get("stream_options", {})
        fields.finish()
        if not isinstance(inner, dict):
            raise ApiError(400, "sampling_params: expected an object", param="sampling_params")
        sampling = Fields({**inner, "stream": stream, **({"stream_options": options} if options else {})})
        wanted = sampling.get("logprobs")
        ask = self._read_ask(sampling, read_num_top(sampling, "logprobs"), wanted is not None, COMPLETION_TOKENS)
        prompts = [client.reader.tokens(token_ids, "token_ids")]
        answer = TokensAnswer(self._served.name, self._within(ask, prompts), prompts, self._served.token_text)
        if isinstance(name, str):
            answer.id = name[:256]
        return await self._answer(request, client, answer)

    async def _fields(self, request: Request) -> Fields:
        """The fields of a body whose model is the served one."""
        fields = Fields(read_json(await read_body(request, self._served.max_body)))
        model = fields.get("model", self._served.name)
        if model != self._served.name and not self._served.any_model:
            message = f"the model {model!r:.100} does not exist; this server has {self._served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return fields

    def _read_ask(self, fields: Fields, num_top: int, log_probs: bool, default_tokens: int) -> Ask:
        if num_top and not self._served.has_top:
            raise ApiError(400, "the log-probs of other tokens are not supported by this engine", param="top_logprobs")
        ask = read_ask(fields, num_top=num_top, log_probs=log_probs, default_tokens=default_tokens)
        fields.finish()
        return ask

    def _within(self, ask: Ask, prompts: list[Prompted]) -> Ask:
        """The request with the most tokens that there is room for, where it did not say how many."""
        longest, limit = max(len(prompt.token_ids) for prompt in prompts), self._served.max_length
        max_tokens = ask.params.max_tokens or limit - longest
        if max_tokens < 1 or longest + max_tokens > limit:
            raise too_long(longest, max_tokens, limit)
        return ask.with_max_tokens(max_tokens)

    async def _answer(self, request: Request, client: Client, answer: Answer) -> Any:
        """Run the request and write its answer, whole or as a stream."""
        exchange, times = Exchange(client.queue, answer), self.metrics.start_request()
        if answer.ask.stream:
            return EventStream(exchange.opened(), answer, times)
        with exchange.opened():
            async for _ in exchange.updates(request.receive):
                pass
        times.end()
        return as_json(answer.whole())

    def guarded(self, handler: Handler, *, open_to_all: bool = False) -> Callable[[Request], Awaitable[Any]]:
        """The handler behind the checks of host and key; what it raises becomes an answer, and is counted."""
        endpoint = handler.__name__

        async def guarded(request: Request) -> Any:
            try:
                self._check_host(request)
                if not open_to_all:
                    self._client(request)
                response = await handler(request)
                status = getattr(response, "status_code", 200)
            except ApiError as error:
                response, status = as_json(error.body, error.status, error.headers), error.status
            except ClientGone:
                response, status = Response(status_code=499), 499
            except Exception:
                log.exception("%s failed", endpoint)
                error = ApiError(500, "the server failed on this request; its log says why", kind="server_error")
                response, status = as_json(error.body, 500), 500
            self.metrics.requests[endpoint, status] += 1
            return response

        return guarded

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._served.is_local and name not in LOCAL_HOSTS:
            raise ApiError(403, "this server answers only requests to 127.0.0.1 or localhost", code="unknown_host")

    def _client(self, request: Request) -> Client:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        client = self._served.backend.client(key.strip() if kind.lower() == "bearer" else "")
        if client is None:
            raise ApiError(401, "wrong or missing API key", kind="authentication_error", code="invalid_api_key")
        return client


def build_app(served: Served) -> Starlette:
    """The application that answers with a model."""
    endpoints = Endpoints(served)
    routes = [
        Route("/v1/models", endpoints.guarded(endpoints.models), methods=["GET"]),
        Route("/v1/chat/completions", endpoints.guarded(endpoints.chat), methods=["POST"]),
        Route("/v1/completions", endpoints.guarded(endpoints.completions), methods=["POST"]),
        Route("/inference/v1/generate", endpoints.guarded(endpoints.generate), methods=["POST"]),
        Route("/health", endpoints.guarded(endpoints.health, open_to_all=True), methods=["GET"]),
        Route("/metrics", endpoints.guarded(endpoints.show_metrics, open_to_all=True), methods=["GET"]),
    ]

    async def unknown(request: Request, error: Any) -> Response:
        message = {404: f"there is nothing at {request.url.path!r:.100}", 405: "this method is not allowed here"}
        text = message.get(error.status_code, str(error.detail))
        code = "not_found" if error.status_code == 404 else "method_not_allowed"
        return as_json(ApiError(error.status_code, text, code=code).body, error.status_code, error.headers)

    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
