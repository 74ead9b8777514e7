"""The options that commands with a model in an engine share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse

if TYPE_CHECKING:
    from gspo.build.served.engine import ServedEngine
    from gspo.build.served.source import ModelSource

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder, run, checkpoint, hub name, or embedded. A run: its newest checkpoint."
    ),
]
EngineKind = Annotated[str, typer.Option(help="native, vllm, or a registered engine.")]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="Responses that run at once. Default: 64; on a GPU 256.")]
MaxLength = Annotated[
    int | None,
    typer.Option(min=2, help="Longest prompt and answer, in tokens. Default: the model's, at most 4096 (GPU 32768)."),
]
ToolFormatName = Annotated[
    str | None, typer.Option(help="How the model writes tool calls: auto, hermes, tokenizer, python, tag.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
MemoryShare = Annotated[float, typer.Option(min=0.05, max=0.98, help="Share of a GPU's memory for the KV cache.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code of the model's folder.")]


def open_model(words: str, **options: Any) -> tuple[ModelSource, ServedEngine]:
    """The model that the words name, in an engine; a model that cannot be loaded ends the command."""
    from gspo.build.served.engine import open_engine
    from gspo.build.served.source import find_source
    from gspo.environments.protocol import EnvironmentProblem
    from gspo.models import ModelError
    from gspo.registry import PluginError
    from gspo.rollout.engine import EngineError

    try:
        source = find_source(words)
        return source, open_engine(source, **options)
    except (ModelError, EngineError, EnvironmentProblem, PluginError) as error:
        refuse(error)
