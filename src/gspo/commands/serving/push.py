"""`gspo push`: a run's model, with its model card, to the Hugging Face hub or a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse

app = typer.Typer(add_completion=False)


@app.command()
def push(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder (its newest checkpoint), or a checkpoint in one.")
    ],
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; made if it is not there.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be uploaded, and upload nothing.")
    ] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private when it is new.")] = False,
    to: Annotated[Path | None, typer.Option(help="Write the folder here instead of uploading it.")] = None,
) -> None:
    """Upload a run's model with a model card: base, data, objective, settings, result, how to load.

    Log in first with `hf auth login`, or set HF_TOKEN.
    """
    from gspo.build.served.source import find_source
    from gspo.checkpoint.contents import CheckpointError
    from gspo.loop.export import export_model
    from gspo.models import ModelError

    if name.count("/") != 1 or not all(name.split("/")):
        refuse(f"{name}: expected owner/name")
    if to is not None and to.exists():
        refuse(f"{to}: exists already; give a new folder")
    try:
        source = find_source(run)
        if source.run is None:
            refuse(f"{run}: no run folder and no checkpoint of one; a model card needs the run's files")
        with tempfile.TemporaryDirectory(dir=None if to is None else _parent(to)) as scratch:
            folder = Path(scratch) / "model"
            export_model(Path(source.path), folder, name)
            if to is not None:
                folder.rename(to)
                typer.echo(f"{source.path} is in {to}, with a model card")
            elif dry_run:
                _describe(folder, source.path, name)
            else:
                _upload(folder, name, private, Path(source.path).name)
    except (ModelError, CheckpointError, OSError) as error:
        refuse(error)


def _parent(to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    return to.parent


def _describe(folder: Path, source: str, name: str) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    typer.echo(f"would upload {source} to {name}: {len(files)} files")
    for path in files:
        typer.echo(f"  {path.relative_to(folder)}  {path.stat().st_size} bytes")
    typer.echo("")
    typer.echo((folder / "README.md").read_text(encoding="utf-8"))


def _upload(folder: Path, name: str, private: bool, step: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"{step} by gspo push")
    except HfHubHTTPError as error:
        refuse(f"{name}: the hub refused: {str(error).splitlines()[0]}")
    except Exception as error:  # types of the HTTP client, which is not part of the hub's interface
        refuse(f"{name}: the hub cannot be reached ({(str(error) or type(error).__name__).splitlines()[0]})")
    typer.echo(f"uploaded to {getattr(done, 'repo_url', None) or name}")
