"""`longlaw grid`: plan, submit and follow grids, as a client of the service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from api.models import GridDetail
from database.settings import Settings
from longlaw.client import ENDED, Client
from longlaw.errors import LonglawError
from longlaw.grid_document import read_grid_file, resolve_corpora
from longlaw.lazy_commands import LazyCommand, LazyGroup
from longlaw.progress_view import progress_line, progress_view, short_count


class _Commands(LazyGroup):
    lazy = {  # noqa: RUF012 - a constant; the base class says ClassVar
        "plan": LazyCommand(
            module="longlaw.plan_command",
            attribute="plan_command",
            help="Show what a grid would train and cost, from scratch; needs no service.",
        ),
        "ready": LazyCommand(
            module="longlaw.ready_grids",
            attribute="ready_command",
            help="List the grid files that come with Longlaw, or print one: a start for a grid of your own.",
        ),
        "cancel": LazyCommand(
            module="longlaw.verb_commands",
            attribute="cancel_command",
            help="Stop a grid for good; what is measured, and what other grids ask for, stays.",
        ),
        "pause": LazyCommand(
            module="longlaw.verb_commands",
            attribute="pause_command",
            help="Let nothing begin for a grid; training ends at its next checkpoint.",
        ),
        "resume": LazyCommand(
            module="longlaw.verb_commands", attribute="resume_command", help="Let a paused grid go on."
        ),
        "retry": LazyCommand(
            module="longlaw.verb_commands",
            attribute="retry_command",
            help="Open again what failed of a grid, with new retry budgets.",
        ),
    }


grid_app = typer.Typer(cls=_Commands, help="Plan, submit, follow and steer grids.", no_args_is_help=True)

Url = Annotated[
    str | None, typer.Option("--url", help="The service's address; LONGLAW_URL, else http://127.0.0.1:8000.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
GridId = Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of a grid; the newest one by default.")]


@grid_app.command()
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A grid file, YAML or JSON; - reads standard input.")],
    idempotency_key: Annotated[
        str | None, typer.Option(help="Repeating the command with the same key submits nothing twice.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Launch a grid: what it needs and does not find is trained. Corpora are looked up in LONGLAW_STORE."""
    document = resolve_corpora(read_grid_file(file), Settings().store)
    with Client(url) as client:
        created = client.submit(document, idempotency_key=idempotency_key)
    if as_json:
        typer.echo(created.model_dump_json(indent=2))
        return
    typer.echo(f"Grid {created.name!r} is submitted: {created.id}")
    typer.echo(f"Follow it with: longlaw grid watch {created.id}")


@grid_app.command()
def status(grid_id: GridId = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show how far a grid is and what waits for what."""
    with Client(url) as client:
        grid = client.grid(grid_id or _newest(client))
    if as_json:
        typer.echo(grid.model_dump_json(indent=2))
    else:
        Console().print(progress_view(grid))


@grid_app.command()
def watch(
    grid_id: GridId = None,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks.")] = 1.0,
    url: Url = None,
) -> None:
    """Follow a grid until it ends; exits with 1 unless all of its cells were measured."""
    with Client(url) as client:
        state = follow(client, grid_id or _newest(client), Console(), every_s=every_s)
    if state != "SUCCEEDED":
        raise typer.Exit(1)


@grid_app.command("list")
def list_grids(
    limit: Annotated[int, typer.Option(min=1, help="Grids at most.")] = 20, url: Url = None, as_json: AsJson = False
) -> None:
    """List grids, newest first."""
    with Client(url) as client:
        grids = [grid for grid, _ in zip(client.grids(), range(limit), strict=False)]
    if as_json:
        typer.echo("[" + ",\n".join(grid.model_dump_json(indent=2) for grid in grids) + "]")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("id", "name", "state", "UTC", "to train"):  # eighty columns hold all but a long name
        justify: Literal["left", "right"] = "right" if title == "to train" else "left"
        table.add_column(title, justify=justify, no_wrap=title != "name", overflow="fold")
    for grid in grids:
        state = "paused" if grid.paused_at else grid.state
        table.add_row(grid.id, grid.name, state, f"{grid.created_at:%m-%d %H:%M}", short_count(grid.tokens_train))
    Console().print(table)


def follow(client: Client, grid_id: str, console: Console, *, every_s: float = 1.0) -> str:
    """Shows a grid until it ends, live on a terminal and as a few lines elsewhere; returns its final state."""
    with _live(console) if console.is_terminal else _in_lines(console) as update:
        for grid in client.watch(grid_id, every_s=every_s):
            update(grid)
    return grid.state


@contextlib.contextmanager
def _live(console: Console) -> Iterator[Callable[[GridDetail], None]]:
    """The whole view, kept up to date in place."""
    with Live(console=console, auto_refresh=False) as live:
        yield lambda grid: live.update(progress_view(grid), refresh=True)


@contextlib.contextmanager
def _in_lines(console: Console) -> Iterator[Callable[[GridDetail], None]]:
    """A line when the state changes or a tenth more tokens are done; the whole view in the end if anything failed."""
    told: tuple[str, bool, int] | None = None

    def update(grid: GridDetail) -> None:
        nonlocal told
        now = (grid.state, grid.paused_at is not None, 10 * grid.tokens_done // max(grid.tokens_total, 1))
        if now != told:
            console.print(progress_line(grid), highlight=False, soft_wrap=True)
            told = now
        if grid.state in ENDED and (grid.state != "SUCCEEDED" or grid.failures):  # follow-ups are no cells
            console.print(progress_view(grid))

    yield update


def _newest(client: Client) -> str:
    newest = next(client.grids(), None)
    if newest is None:
        raise LonglawError("There is no grid yet: `longlaw grid submit FILE` launches one.")
    return newest.id
