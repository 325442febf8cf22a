"""`longlaw report`: what grids have measured, as a page with tables, figures and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from longlaw.client import Client
from longlaw.report_caveats import what_it_does_not_show
from longlaw.report_comparison import against_shortppl, observation_rules, two_protocols
from longlaw.report_data import gather
from longlaw.report_law import forecasts, forms, the_law
from longlaw.report_measured import distant_context, longppl, noise_between_seeds, what_was_run
from longlaw.report_page import write_page

_OPENING = (
    "Written by `longlaw report` from the measurements of one service. Every number and every statement below a table "
    "is computed from them; running the same grids again and asking for the report again renews the page."
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


def report_command(
    grid_ids: Annotated[list[str], typer.Argument(metavar="GRID_ID...", help="Grids to report on together.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the page; its images go to images/NAME/ below.")],
    name: Annotated[str | None, typer.Option(help="Name of the page; that of the first grid by default.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="The service's address; LONGLAW_URL, else http://127.0.0.1:8000.")
    ] = None,
) -> None:
    """Write what grids have measured as a page: tables, figures, and an honest reading beside each."""
    with Client(url) as client:
        page = write_report(client, grid_ids, out, name=name)
    typer.echo(f"wrote {page}")


def write_report(client: Client, grid_ids: Sequence[str], directory: Path, *, name: str | None = None) -> Path:
    """Writes DIRECTORY/NAME.md and DIRECTORY/images/NAME/*.png; returns the page's path.

    Args:
        client: of the service that holds the grids.
        grid_ids: grids to report on together; the first gives the page its title.
        directory: is made if it is not there.
        name: of the page, by default the first grid's, reduced to what any file system takes.

    Raises:
        NothingMeasuredError: none of the grids has a measurement yet.
        ApiProblem: there is no such grid.
    """
    data = gather(client, grid_ids)
    title = data.grids[0].grid.name
    sections = [
        what_was_run(data),
        longppl(data.main),
        distant_context(data.main),
        noise_between_seeds(data.main),
        the_law(data.main),
        forms(data.main),
        forecasts(data.main),
        two_protocols(data),
        observation_rules(data),
        against_shortppl(data.main),
        what_it_does_not_show(data),
    ]
    stem = _NOT_IN_NAMES.sub("-", name or title).strip("-") or "report"
    return write_page(directory, stem, title, _OPENING, sections)
