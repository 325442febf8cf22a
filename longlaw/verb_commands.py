"""`longlaw grid cancel`, `pause`, `resume` and `retry`: what a grid can be told, and what comes of it in words."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from api.models_verbs import GridAnswer
from longlaw.client import Client

Url = Annotated[
    str | None, typer.Option("--url", help="The service's address; LONGLAW_URL, else http://127.0.0.1:8000.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the grid after it, as JSON for programs.")]
GridId = Annotated[str, typer.Argument(metavar="ID", help="Id of a grid, as `longlaw grid list` has it.")]

#: Verb -> what is said of the grid, and of the work that it was about.
_SAID = {
    "cancel": ("is cancelled", "stopped"),
    "pause": ("is paused", "waits"),
    "resume": ("goes on", "goes on"),
    "retry-failed": ("tries again", "opened again"),
}


def cancel_command(
    grid_id: GridId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Stop a grid for good. Measured cells, checkpoints, and what other grids ask for stay.

    On a terminal it first says what it will stop, and asks.
    """
    with Client(url) as client:
        if sys.stdin.isatty() and not yes and not as_json:
            preview = client.cancel(grid_id, preview=True)
            if not preview.obeyed.repeated:
                typer.echo("\n".join([f"To cancel grid {preview.name!r}:", *_told(preview)]))
                typer.confirm("Cancel it?", abort=True)
        _show(client.cancel(grid_id), as_json=as_json)


def pause_command(grid_id: GridId, url: Url = None, as_json: AsJson = False) -> None:
    """Let nothing begin for a grid; training ends at its next checkpoint and waits for `resume`."""
    with Client(url) as client:
        _show(client.pause(grid_id), as_json=as_json)


def resume_command(grid_id: GridId, url: Url = None, as_json: AsJson = False) -> None:
    """Let a paused grid go on, from its newest checkpoints."""
    with Client(url) as client:
        _show(client.resume(grid_id), as_json=as_json)


def retry_command(grid_id: GridId, url: Url = None, as_json: AsJson = False) -> None:
    """Open again what failed of a grid, with new retry budgets, from its newest checkpoints."""
    with Client(url) as client:
        _show(client.retry_failed(grid_id), as_json=as_json)


def _show(grid: GridAnswer, *, as_json: bool) -> None:
    if as_json:
        typer.echo(grid.model_dump_json(indent=2))
        return
    said, _ = _SAID[grid.obeyed.verb]
    already = f" already, since {grid.obeyed.at:%Y-%m-%d %H:%M} UTC" if grid.obeyed.repeated else ""
    typer.echo("\n".join([f"Grid {grid.name!r} {said}{already}.", *_told(grid)]))


def _told(grid: GridAnswer) -> list[str]:
    """What a verb did, or would do, one thing to a line."""
    done = grid.obeyed
    _, did = _SAID[done.verb]
    lines = {did: _work(done.segments, done.evaluations)}
    if done.attempts:
        runs = {"cancel": "running now", "pause": "running until the next checkpoint"}[done.verb]
        lines[did] += f"; {done.attempts:,} {runs}"
    if done.segments_kept or done.evaluations_kept:
        lines["goes on"] = f"{_work(done.segments_kept, done.evaluations_kept)}: other grids ask for them"
    if done.verb == "cancel":
        lines["saved"] = f"{done.tokens_saved:,} tokens of training"
        lines["stays"] = f"{done.cells_measured:,} of {sum(grid.cells.values()):,} cells measured, and all checkpoints"
    return [f"  {what:<12}  {text}" for what, text in lines.items()]


def _work(segments: int, evaluations: int) -> str:
    return f"{_some(segments, 'segment')}, {_some(evaluations, 'evaluation')}"


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
