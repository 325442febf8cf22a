"""What a finished grid says: measurements, use of distant context, the fit, and predictions of what it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from api.models import Cell, CellEvaluation, FitDetail
from longlaw.client import Client

Value = Callable[[CellEvaluation], str]


def print_report(console: Console, client: Client, grid_id: str) -> None:
    """Prints the tables of one grid; a fit that was not possible is said instead of shown."""
    grid = client.grid(grid_id)
    cells = list(client.cells(grid_id))
    for series in client.series():
        if series.id not in grid.series:
            continue
        console.print(f"\n[bold]Measured: log LongPPL[/bold] ({series.label})")
        console.print(_by_tokens(cells, series.id, lambda e: _number(e.log_longppl)))
        if any(e.key_gap is not None for cell in cells for e in cell.evaluations):
            console.print(
                "[bold]Use of distant context[/bold]: loss of key tokens with only the local chunk, minus with full "
                "context (nats)"
            )
            console.print(_by_tokens(cells, series.id, lambda e: _number(e.key_gap)))
        fits = [client.fit(fit.id) for fit in client.fits(series=series.id) if fit.state == "SUCCEEDED"]
        pooled = next((fit for fit in fits if fit.holdout is None), None)
        apart = next((fit for fit in fits if fit.holdout is not None and fit.holdout.selection == grid.holdout), None)
        if pooled is None:
            console.print("No fit: the law needs at least seven distinct observations.")
        else:
            _print_fit(console, pooled)
        if apart is not None:
            _print_held_out(console, apart)


def _by_tokens(cells: Sequence[Cell], series_id: str, value: Value) -> Table:
    """One row for each (scale, D_s, seeds), one column for each D_l."""
    columns = sorted({cell.long_tokens for cell in cells})
    rows: dict[tuple[int, str, int | None, int, int], dict[int, str]] = {}
    for cell in cells:
        row = rows.setdefault((cell.n_params, cell.scale, cell.short_tokens, cell.short_seed, cell.long_seed), {})
        for evaluation in cell.evaluations:
            if evaluation.series_id == series_id:
                row[cell.long_tokens] = value(evaluation)
    many_seeds = len({key[3:] for key in rows}) > 1
    table = Table(box=None, pad_edge=False)
    for title in ("scale", "N", "D_s", *(["seeds"] if many_seeds else []), *(f"D_l {c:,}" for c in columns)):
        table.add_column(title, justify="left" if title == "scale" else "right")
    for (n_params, scale, short_tokens, *seeds), values in sorted(rows.items()):
        shown = [f"{seeds[0]}/{seeds[1]}"] if many_seeds else []
        short = "unknown" if short_tokens is None else f"{short_tokens:,}"
        table.add_row(scale, f"{n_params:,}", short, *shown, *(values.get(c, "") for c in columns))
    return table


def _print_fit(console: Console, fit: FitDetail) -> None:
    console.print(f"\n[bold]The law[/bold], fitted to all {fit.n_observations} observations: {fit.status}")
    console.print("log LongPPL = A N^-alpha + B_s D_s^-beta_s + B_l D_l^-beta_l + C", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("parameter", "value", f"{fit.level or 0:.0%} interval", ""):
        table.add_column(title, justify="left" if title in ("parameter", "") else "right")
    for parameter in fit.parameters:
        notes = ["at a bound"] * parameter.at_bound + ["not identifiable"] * (not parameter.identifiable)
        known = parameter.low is not None and parameter.high is not None
        interval = f"{parameter.low:.4g} .. {parameter.high:.4g}" if known else "-"
        table.add_row(parameter.name, f"{parameter.value:.6g}", interval, ", ".join(notes))
    console.print(table)
    for line in fit.explanation:
        console.print(f"- {line}", highlight=False, soft_wrap=True)


def _print_held_out(console: Console, fit: FitDetail) -> None:
    assert fit.holdout is not None
    console.print(
        f"\n[bold]Predicted against measured[/bold]: LongPPL at {fit.holdout.selection}, from a fit that never saw it"
    )
    table = Table(box=None, pad_edge=False)
    for title in ("scale", "D_s", "D_l", "predicted", "interval", "measured", "error"):
        table.add_column(title, justify="left" if title == "scale" else "right")
    for row in fit.observations:
        if row.role != "held_out" or row.predicted is None:
            continue
        interval = (
            f"{math.exp(row.low):.2f} .. {math.exp(row.high):.2f}"
            if row.low is not None and row.high is not None
            else "-"
        )
        table.add_row(
            row.scale,
            f"{row.short_tokens:,}",
            f"{row.long_tokens:,}",
            f"{math.exp(row.predicted):.2f}",
            interval,
            f"{math.exp(row.log_longppl):.2f}",
            f"{math.expm1(row.predicted - row.log_longppl):+.1%}",
        )
    console.print(table)
    measures = {
        "R^2": _number(fit.holdout.r2),
        "MAPE of LongPPL": _percent(fit.holdout.mape_ppl),
        "MAPE of log LongPPL": _percent(fit.holdout.mape_log),
        "bias": f"{_number(fit.holdout.bias, signed=True)} nats",
    }
    console.print(
        "Held out: " + ", ".join(f"{name} {value}" for name, value in measures.items()), highlight=False, soft_wrap=True
    )
    console.print()


def _number(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:+.3f}" if signed else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"
