"""`gspo recipes`: the recipes that come with the package, for `gspo train NAME`."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False)


@app.command()
def recipes() -> None:
    """List the named recipes: each is trained by `gspo train NAME`."""
    from gspo.config.loading.sources import named_recipes

    for name, path in named_recipes().items():
        typer.echo(f"{name:12} {_first_comment(path.read_text(encoding='utf-8'))}")


def _first_comment(text: str) -> str:
    """What a recipe says about itself: its first line."""
    return text.partition("\n")[0].lstrip("# ")
