"""`gspo serve`: an OpenAI-compatible server over a model, a run or a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from gspo.commands import refuse
from gspo.commands.serving.options import (
    Device,
    Dtype,
    EngineKind,
    MaxLength,
    MaxNumSeqs,
    MemoryShare,
    Model,
    ToolFormatName,
    TrustRemoteCode,
    open_model,
)

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    model: Model,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Without a key, anyone who reaches it can use it.")
    ] = ("127.0.0.1"),
    api_key: Annotated[
        str | None, typer.Option(envvar="GSPO_API_KEY", show_envvar=True, help="Key that clients must send.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model. Default: of its folder.")] = None,
    engine: EngineKind = "native",
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxLength = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Responses that may run or wait; more get status 429.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest body of a request, in MiB; more gets 413.")] = 8,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time for open requests to finish when stopped.")] = 30.0,
    tool_format: ToolFormatName = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    gpu_memory_utilization: MemoryShare = 0.8,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a model with OpenAI's API: chat completions, completions, and tokens in and out.

    Ctrl-C stops it when the open requests are answered.
    """
    try:
        from gspo.serving.app import Served, build_app
        from gspo.serving.server import listen, make_server, url_of
    except ImportError as error:
        refuse(f"gspo serve needs the extra `serve` ({error.name} is missing): pip install 'gspo[serve]'")
    from gspo.serving.backend import SharedBackend
    from gspo.serving.batcher import Batcher

    try:
        listener = listen(host, port)
    except OSError as error:
        refuse(f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port, or --port 0")
    source, opened = open_model(
        model,
        kind=engine,
        num_slots=max_num_seqs,
        max_length=max_model_len,
        device=device,
        dtype=dtype,
        memory_utilization=gpu_memory_utilization,
        tool_format=tool_format,
        trust_remote_code=trust_remote_code,
    )
    is_local = host in ("127.0.0.1", "localhost", "::1")
    batcher = Batcher(opened.engine, opened.decode, max_open=max_queue)
    served = Served(
        served_model_name or source.name,
        SharedBackend(opened.reader, batcher, api_key),
        opened.token_text,
        opened.max_length,
        opened.num_slots,
        has_top=engine == "native",
        max_body=max_body_mb << 20,
        is_local=is_local,
    )
    with listener:
        typer.echo(f"serving {served.name} at {url_of(listener)}/v1 (Ctrl-C stops it)")
        if not is_local and api_key is None:
            typer.echo(f"warning: listening on {host} without --api-key: everyone who reaches it can use it", err=True)
        try:
            make_server(build_app(served), drain_seconds).run(sockets=[listener])
        finally:
            batcher.close()
