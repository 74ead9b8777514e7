"""`gspo chat`: talk to a model in the terminal."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse
from gspo.commands.serving.options import Device, Dtype, MaxLength, Model, ToolFormatName, TrustRemoteCode, open_model

if TYPE_CHECKING:
    from gspo.build.served.engine import ServedEngine
    from gspo.environments.loading import Make
    from gspo.environments.protocol import Environment
    from gspo.serving.batcher import Batcher
    from gspo.serving.parameters import Ask

app = typer.Typer(add_completion=False)
HELP = "/system TEXT sets the system message, /reset begins again, /quit or Ctrl-D ends."
TURNS = "actor_rollout_ref.rollout.multi_turn"
MAX_TURNS = 16  # of tools after one message


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the probability that is drawn from.")] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: all there is room for.")
    ] = None,
    tools: Annotated[bool, typer.Option(help="Give the model the tools of its run's environment.")] = True,
    max_model_len: MaxLength = None,
    tool_format: ToolFormatName = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a model, a run or a checkpoint. Answers appear while they are written.

    /system TEXT sets the system message, /reset begins again, /quit or Ctrl-D ends. A model whose run had an
    environment with tools gets them.
    """
    from gspo.rollout.engine import SamplingParams
    from gspo.serving.batcher import Batcher
    from gspo.serving.parameters import Ask, as_temperature

    make, environment = _environment(model) if tools else (None, None)
    preferred = tool_format or getattr(environment, "tool_format", None)
    options: dict[str, Any] = {"max_length": max_model_len, "device": device, "dtype": dtype}
    _, opened = open_model(model, num_slots=1, tool_format=preferred, trust_remote_code=trust_remote_code, **options)
    params = SamplingParams(max_tokens or 0, as_temperature(temperature), top_p=top_p)
    batcher = Batcher(opened.engine, opened.decode)
    try:
        talk = Talk(opened, batcher, Ask(params, stream=True), environment, system, make)
        typer.echo(HELP, err=True)
        _read_lines(talk)
    finally:
        batcher.close()


def _environment(model: str) -> tuple[Make | None, Environment | None]:
    """What makes the environment of the run that a model is from, and one of them, if it has tools."""
    from gspo.build.served.source import find_source
    from gspo.environments.loading import EnvironmentSpec, load_environment
    from gspo.environments.protocol import EnvironmentProblem
    from gspo.models import ModelError
    from gspo.registry import PluginError

    try:
        settings = find_source(model).settings
        name, path = settings.get("environment.name"), settings.get("environment.path")
        functions, configured = settings.get(f"{TURNS}.function_tool_path"), settings.get(f"{TURNS}.tool_config_path")
        if not any((name, path, functions, configured)):
            return None, None
        kwargs, plugins = settings.get("environment.kwargs") or {}, settings.get("trainer.plugins") or ()
        make = load_environment(EnvironmentSpec(name, path, dict(kwargs), functions, configured, tuple(plugins)))
        found = make()
    except (ModelError, EnvironmentProblem, PluginError) as error:
        refuse(error)
    if found.tools:
        return make, found
    found.close()
    return None, None


def _read_lines(talk: Talk) -> None:
    """One message per line, until the input ends."""
    while True:
        typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/quit":
            return
        if text == "/reset":
            talk.reset()
        elif text.startswith("/system"):
            talk.reset(text.removeprefix("/system").strip())
        elif text.startswith("/"):
            typer.echo(HELP, err=True)
        elif text:
            talk.say(text, lambda part: typer.echo(part, nl=False))
            typer.echo("")


class Talk:
    """A conversation with a model; tool calls are answered by an environment, of which `make` makes new ones."""

    def __init__(
        self,
        opened: ServedEngine,
        batcher: Batcher,
        ask: Ask,
        environment: Environment | None,
        system: str | None,
        make: Make | None = None,
    ) -> None:
        self._opened, self._batcher, self._ask, self._environment = opened, batcher, ask, environment
        self._make = make
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def reset(self, system: str | None = None) -> None:
        """Begin again, with a new environment; `system` replaces the system message ("": none)."""
        if self._make is not None and self._environment is not None:
            self._environment.close()
            self._environment = self._make()
        self._begin(self._system if system is None else system)

    def say(self, text: str, show: Callable[[str], None]) -> None:
        """Send a message and show the answer while it is written; a message that is refused is taken back."""
        from gspo.serving.errors import ApiError

        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(MAX_TURNS):
                if not self._answer(show):
                    return
        except ApiError as error:
            del self.messages[before:]
            typer.echo(f"error: {error.message}", err=True)

    def _answer(self, show: Callable[[str], None]) -> bool:
        """One turn of the model; True when a tool answered it and the model goes on."""
        from gspo.environments.protocol import Action
        from gspo.serving.tool_calls import split_calls

        reader, tools = self._opened.reader, [] if self._environment is None else list(self._environment.tools)
        text = self._generate(tools, show)
        content, calls = split_calls(text, reader.tool_format, tools) if tools else (text, [])
        said = {"role": "assistant", "content": content or "", **({"tool_calls": calls} if calls else {})}
        self.messages.append(said)
        if not calls or self._environment is None:
            return False
        step = self._environment.step(Action(text, reader.tool_format.parse(text)))
        for call, message in zip(calls, step.messages):
            show(f" [{message['content']}] ")
            self.messages.append({**message, "role": "tool", "tool_call_id": call["id"]})
        return True

    def _generate(self, tools: list[Any], show: Callable[[str], None]) -> str:
        """The text of one turn."""
        import dataclasses

        from gspo.serving.errors import ApiError, too_long

        reader, ask = self._opened.reader, self._ask
        prompted = reader.chat(self.messages, tools)
        room = self._opened.max_length - len(prompted.token_ids)
        if room < 1:
            raise too_long(len(prompted.token_ids), 1, self._opened.max_length)
        if tools and reader.tool_format.inline:
            ask = dataclasses.replace(ask, call_end=reader.tool_format.call_end)
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batcher.open(prompted, ask.with_max_tokens(min(room, ask.params.max_tokens or room)), arrived.put)
        text = ""
        while True:
            found = arrived.get()
            if isinstance(found, ApiError):
                raise found
            for update in found:
                text += update.text
                show(update.text)
                if update.reason is not None:
                    return text
