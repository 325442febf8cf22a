"""``longlaw fit TABLE``: fit the law to a table of one's own, without any service."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fitting.errors import FittingError, InvalidObservationsError
from fitting.explain import explain
from fitting.holdout import select_rows
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT, law_named
from fitting.observations import Columns, Observations, observations_from_table
from fitting.values import Fit, Interval, RejectedRow

_USAGE_ERROR = 2


def fit_command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv or .parquet file, one observation per row.")],
    n_col: Annotated[str, typer.Option(help="Column of N, non-embedding parameters.")] = "N",
    short_col: Annotated[str, typer.Option(help="Column of D_s, tokens of the short stage.")] = "Ds",
    long_col: Annotated[str, typer.Option(help="Column of D_l, tokens of the long stage.")] = "Dl",
    loss_col: Annotated[str, typer.Option(help="Column of log LongPPL itself, in nats.")] = "loss",
    huber_delta: Annotated[float, typer.Option(help="Where the Huber loss turns linear, in nats.")] = 0.05,
    bootstrap: Annotated[int, typer.Option(help="Refits behind the intervals; 0 for none.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the resampling.")] = 0,
    level: Annotated[float, typer.Option(help="Nominal coverage of the intervals.")] = 0.9,
    cluster: Annotated[
        str | None, typer.Option(help="Column that names the short checkpoint of a row; (N, D_s) where absent.")
    ] = None,
    holdout: Annotated[
        str | None, typer.Option(metavar="COL=VALUE", help="Rows to predict and compare, never fitted.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COL=VALUE", help="Rows to leave out altogether; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fit the seven-parameter law to a table of (N, D_s, D_l, log LongPPL)."""
    columns = Columns(
        n_params=n_col, short_tokens=short_col, long_tokens=long_col, log_longppl=loss_col, cluster=cluster
    )
    try:
        fitted_rows, held_out, dropped = _read(table, columns, holdout, drop or [])
        result = fit(
            LONG_CONTEXT,
            fitted_rows,
            huber_delta=huber_delta,
            bootstrap_draws=bootstrap,
            seed=seed,
            level=level,
            holdout=held_out,
        )
    except FittingError as error:
        _fail(str(error))
    excluded = (*dropped, *result.excluded)
    if as_json:
        typer.echo(json.dumps(_as_json(result, excluded), indent=2, allow_nan=False))
    else:
        _print(result, excluded)


def _fail(message: str) -> NoReturn:
    typer.echo(f"longlaw fit: {message}", err=True)
    raise typer.Exit(_USAGE_ERROR)


def _read(
    path: Path, columns: Columns, holdout: str | None, drop: list[str]
) -> tuple[Observations, Observations | None, list[RejectedRow]]:
    table = _load(path)
    row_ids = np.arange(1, len(table) + 1)
    kept = np.ones(len(table), dtype=bool)
    dropped: list[RejectedRow] = []
    for selection in drop:
        chosen = select_rows(table, selection) & kept
        dropped += [RejectedRow(row=int(row), reason=f"dropped by {selection}") for row in row_ids[chosen]]
        kept &= ~chosen
    held = select_rows(table, holdout) & kept if holdout is not None else np.zeros(len(table), dtype=bool)

    def part(rows: NDArray[np.bool_]) -> Observations:
        return observations_from_table(table[rows], columns=columns, row_ids=row_ids[rows].tolist())

    return part(kept & ~held), part(held) if holdout is not None else None, dropped


def _load(path: Path) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise InvalidObservationsError(f"{path} is neither .csv nor .parquet")
    try:
        return pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pandas' and pyarrow's parse errors are ValueErrors
        raise InvalidObservationsError(f"cannot read {path}: {error}") from error


def _as_json(result: Fit, excluded: tuple[RejectedRow, ...]) -> dict[str, object]:
    names = law_named(result.law).parameter_names
    return {
        "law": result.law,
        "status": result.status.value,
        "objective": result.objective,
        "gradient_norm": result.gradient_norm,
        "params": dict(zip(names, result.parameters, strict=True)),
        "intervals": dict(zip(names, map(_pair, result.intervals), strict=True)),
        "level": result.level,
        "n_observations": result.n_observations,
        "n_clusters": result.n_clusters,
        "n_draws": result.n_draws,
        "n_draws_ok": result.n_draws_ok,
        "residual_std": result.residual_std,
        "r2": result.r2,
        "mape_log": result.mape_log,
        "at_bound": list(result.at_bound),
        "not_identifiable": list(result.not_identifiable),
        "jacobian_rank": result.jacobian_rank,
        "holdout": None
        if result.holdout is None
        else {
            "n_observations": result.holdout.n_observations,
            "r2": result.holdout.r2,
            "mape_log": result.holdout.mape_log,
            "mape_ppl": result.holdout.mape_ppl,
            "bias": result.holdout.bias,
        },
        "penalty": {"lambda": 0, "binds": False},
        "excluded": [{"row": row.row, "reason": row.reason} for row in excluded],
        "warnings": list(result.warnings),
    }


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _print(result: Fit, excluded: tuple[RejectedRow, ...]) -> None:
    console = Console()
    law = law_named(result.law)
    console.print(law.formula, highlight=False)
    console.print(
        f"status [bold]{result.status}[/bold] · {result.n_observations} observations · objective "
        f"{result.objective:.10g} · gradient {result.gradient_norm:.1e}",
        highlight=False,
    )
    parameters = Table("parameter", "value", f"{result.level:.0%} interval", "note")
    for name, value, interval in zip(law.parameter_names, result.parameters, result.intervals, strict=True):
        note = "not identifiable" if name in result.not_identifiable else "at bound" if name in result.at_bound else ""
        span = "-" if interval is None else f"{interval.low:.5g} .. {interval.high:.5g}"
        parameters.add_row(name, f"{value:.8g}", span, note)
    console.print(parameters)
    if result.holdout is not None:
        held = result.holdout
        metrics = Table("held out", "R2", "MAPE log LongPPL %", "MAPE LongPPL %", "bias (nats)")
        shown = [_number(held.r2), _number(held.mape_log), _number(held.mape_ppl), f"{held.bias:+.4g}"]
        metrics.add_row(str(held.n_observations), *shown)
        console.print(metrics)
    for sentence in explain(result):
        console.print(f"  {sentence}", markup=False, highlight=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    by_reason: dict[str, list[str]] = {}
    for row in excluded:
        by_reason.setdefault(row.reason, []).append(str(row.row))
    for reason, rows in by_reason.items():
        console.print(f"left out {len(rows)} rows ({', '.join(rows)}): {reason}", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
