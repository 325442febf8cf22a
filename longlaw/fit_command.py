"""``longlaw fit TABLE``: fit a law to a table of one's own, without any service."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray

from fitting.compare import Contender, compare
from fitting.errors import FittingError, InvalidObservationsError
from fitting.holdout import select_rows
from fitting.joint import fit
from fitting.laws import CHINCHILLA, LONG_CONTEXT, TRAJECTORY, VARIANTS, Law, law_named
from fitting.observations import Columns, Observations, observations_from_table
from fitting.profile import Profile, profiles_of
from fitting.values import Fit, Loss, RejectedRow, Resampled, Residual, Slicing
from longlaw.fit_report import as_json, show

_USAGE_ERROR = 2


def fit_command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv or .parquet file, one observation per row.")],
    law: Annotated[str, typer.Option(help="Which law: long_context, its variants, trajectory or chinchilla.")] = (
        LONG_CONTEXT.name
    ),
    n_col: Annotated[str, typer.Option(help="Column of N, non-embedding parameters.")] = "N",
    short_col: Annotated[str, typer.Option(help="Column of D_s, tokens of the short stage.")] = "Ds",
    long_col: Annotated[str, typer.Option(help="Column of D_l, tokens of the long stage.")] = "Dl",
    tokens_col: Annotated[str, typer.Option(help="Column of D, all tokens, for the law chinchilla.")] = "D",
    loss_col: Annotated[str, typer.Option(help="Column of log LongPPL itself, in nats.")] = "loss",
    error_col: Annotated[
        str | None, typer.Option(help="Column of the loss's standard error; rows then weigh 1/se^2.")
    ] = None,
    residual: Annotated[Residual, typer.Option(help="Compare the loss, or its logarithm.")] = Residual.LINEAR,
    huber_delta: Annotated[float, typer.Option(help="Where the Huber loss turns linear.")] = 0.05,
    lad: Annotated[bool, typer.Option("--lad", help="Least absolute deviations instead of the Huber loss.")] = False,
    penalty: Annotated[
        str, typer.Option(metavar="auto|none|X", help="Lambda of the one-sided penalty on the token exponents.")
    ] = "none",
    slices: Annotated[
        Slicing, typer.Option(help="How slices become the exponents above which the penalty acts.")
    ] = Slicing.OFFSET,
    bootstrap: Annotated[int, typer.Option(min=0, max=100_000, help="Refits behind the intervals; 0 for none.")] = 200,
    resample: Annotated[
        Resampled, typer.Option(help="Draw whole clusters, or single rows as if they shared no noise.")
    ] = Resampled.CLUSTERS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
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
    compared: Annotated[
        bool, typer.Option("--compare", help="Also fit the other forms of the law, beside naive baselines.")
    ] = False,
    profiled: Annotated[
        bool, typer.Option("--profile", help="Also give profile intervals of exponents and offset.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write figures there (extra: plots).")] = None,
    json_asked: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fit a law to a table of (N, D_s, D_l, log LongPPL), or of (N, D, loss) for chinchilla."""
    try:
        form = law_named(law)
        frame = _load(table)
        columns = _columns(
            form, frame, n_col, short_col, long_col, tokens_col, loss_col=loss_col, cluster=cluster, error=error_col
        )
        fitted_rows, held_out, dropped = _read(frame, columns, holdout, drop or [])
        result = fit(
            form,
            fitted_rows,
            huber_delta=huber_delta,
            bootstrap_draws=bootstrap,
            seed=seed,
            level=level,
            holdout=held_out,
            loss=Loss.ABSOLUTE if lad else Loss.HUBER,
            residual=residual,
            resampled=resample,
            penalty=_strength(penalty),
            references=slices,
        )
        contenders = (
            compare(fitted_rows, held_out, laws=_rivals(form), huber_delta=huber_delta, residual=residual)
            if compared
            else ()
        )
        profiles = (
            profiles_of(form, fitted_rows, huber_delta=huber_delta, residual=residual, level=level) if profiled else ()
        )
        if plot is not None:
            _plot(plot, result, fitted_rows, held_out, profiles, contenders)
    except FittingError as error:
        _fail(str(error))
    excluded = (*dropped, *result.excluded)
    if json_asked:
        typer.echo(json.dumps(as_json(result, excluded, profiles, contenders), indent=2, allow_nan=False))
    else:
        show(result, excluded, profiles, contenders)


def _rivals(law: Law) -> tuple[Law, ...]:
    return VARIANTS if law in VARIANTS else (law,)


def _plot(
    directory: Path,
    result: Fit,
    rows: Observations,
    holdout: Observations | None,
    profiles: Sequence[Profile],
    contenders: Sequence[Contender],
) -> None:
    try:
        from fitting import plots
    except ModuleNotFoundError as error:
        _fail(f"--plot needs matplotlib ({error}): install longlaw[plots]")
    try:
        paths = plots.save(directory, result, rows, holdout=holdout, profiles=profiles, contenders=contenders)
    except OSError as error:
        _fail(f"cannot write figures to {directory}: {error}")
    typer.echo(f"wrote {', '.join(path.name for path in paths)} to {directory}", err=True)


def _strength(penalty: str) -> float | Literal["auto"]:
    if penalty == "auto":
        return "auto"
    if penalty == "none":
        return 0.0
    try:
        return float(penalty)
    except ValueError:
        raise InvalidObservationsError(f"--penalty is {penalty!r}; it must be auto, none or a number") from None


def _columns(
    law: Law,
    table: pd.DataFrame,
    n_col: str,
    short_col: str,
    long_col: str,
    tokens_col: str,
    *,
    loss_col: str,
    cluster: str | None,
    error: str | None,
) -> Columns:
    n_params: str | None = n_col
    short_tokens: str | None = short_col
    if law is CHINCHILLA:
        short_tokens, long_col = None, tokens_col
    elif law is TRAJECTORY:  # one trajectory may come without its N and D_s, which tell several apart
        n_params, short_tokens = (
            name if name in table.columns and table[name].notna().any() else None for name in (n_col, short_col)
        )
    return Columns(
        n_params=n_params,
        short_tokens=short_tokens,
        long_tokens=long_col,
        log_longppl=loss_col,
        cluster=cluster,
        standard_error=error,
    )


def _fail(message: str) -> NoReturn:
    typer.echo(f"longlaw fit: {message}", err=True)
    raise typer.Exit(_USAGE_ERROR)


def _read(
    table: pd.DataFrame, columns: Columns, holdout: str | None, drop: list[str]
) -> tuple[Observations, Observations | None, list[RejectedRow]]:
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
