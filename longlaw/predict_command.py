"""`longlaw predict`: ask a fit of the service what LongPPL to expect."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from api.models import PredictedPoint, Predictions
from longlaw.client import Client


def predict_command(
    n: Annotated[float, typer.Option("--n", help="N, non-embedding parameters (1e8).")],
    short: Annotated[float, typer.Option("--short", help="D_s, tokens of the short stage.")],
    long: Annotated[list[float], typer.Option("--long", help="D_l, tokens of the long stage; may be repeated.")],
    fit: Annotated[str, typer.Option("--fit", metavar="ID|latest", help="Which fit.")] = "latest",
    series: Annotated[str | None, typer.Option("--series", help="Whose latest fit, where there are several.")] = None,
    holdout: Annotated[
        str | None, typer.Option("--holdout", help="The latest fit that held this out (long_tokens=largest).")
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Nominal coverage of the intervals.")] = 0.9,
    url: Annotated[str | None, typer.Option("--url", help="The service's address; LONGLAW_URL by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Predict LongPPL at (N, D_s, D_l), with intervals and how far that lies outside what was fitted."""
    with Client(url) as client:
        answer = client.predict(
            n_params=n, short_tokens=short, long_tokens=long, fit=fit, series=series, holdout=holdout, level=level
        )
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        _print(answer, Console())


def _print(answer: Predictions, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    share = f"{answer.level:.0%}"
    for column in ("N", "D_s", "D_l", "log LongPPL", f"{share} of the law", f"{share} of a measurement", "LongPPL"):
        table.add_column(column, justify="right")
    for point in answer.predictions:
        table.add_row(
            f"{point.n_params:.4g}",
            f"{point.short_tokens:.4g}",
            f"{point.long_tokens:.4g}",
            f"{point.log_longppl:.4f}" if point.determined else f"({point.log_longppl:.4f})",
            _interval(point.low, point.high),
            _interval(point.prediction_low, point.prediction_high),
            "-" if point.longppl is None else f"{point.longppl:.4g}",
        )
    console.print(table)
    console.print(f"fit {answer.fit_id}: {answer.status}, series {answer.series_id}", highlight=False, style="dim")
    for warning in dict.fromkeys([*answer.warnings, *(text for point in answer.predictions for text in _said(point))]):
        console.print(f"note: {warning}", highlight=False, soft_wrap=True, markup=False)


def _said(point: PredictedPoint) -> list[str]:
    return [f"at D_l = {point.long_tokens:.4g}, {warning}" for warning in point.warnings]


def _interval(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "withheld"
    return f"{low:.4f} to {high:.4f}"
