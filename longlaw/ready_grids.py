"""The grid files that come with Longlaw, in `grids/`, wherever it is installed; `longlaw grid ready`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from longlaw.grid_document import GridFileError

QUICKSTART = "quickstart"


def ready_grids() -> dict[str, Path]:
    """Their files by name, in the order of names."""
    paths = (Path(str(entry)) for entry in files("grids").iterdir())
    return dict(sorted((path.stem, path) for path in paths if path.suffix == ".yaml"))


def ready_grid(name: str) -> Path:
    """The file of that grid.

    Raises:
        GridFileError: there is none; the message lists those there are.
    """
    known = ready_grids()
    if name not in known:
        raise GridFileError(f"no ready grid is called {name!r}; there are {', '.join(known)}")
    return known[name]


def ready_command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this grid's file.")] = None,
) -> None:
    """List the grid files that come with Longlaw, or print one: a start for a grid of your own."""
    if name is not None:
        typer.echo(ready_grid(name).read_text(), nl=False)
        return
    known = ready_grids()
    width = max(map(len, known))
    for known_name, path in known.items():
        typer.echo(f"{known_name:{width}}  {_first_sentence(path)}")


def _first_sentence(path: Path) -> str:
    """That of the comment which opens the file."""
    comment = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).split(". ")[0].rstrip(".") + "."
