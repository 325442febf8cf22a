"""`longlaw import`: results of somebody else's trainer, brought to the service, which fits the law to them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from api.cells import number, plain_text, records, separator_hint, shown, wrong_number_of_cells
from api.models_imports import ObservationsImported
from longlaw.client import Client
from longlaw.errors import ApiProblem, LonglawError, ProblemPlace

#: Field of an observation -> what a table may call it, and the option that says otherwise.
_NAMES = {
    "n_params": (("N", "n_params"), "--n-col"),
    "short_tokens": (("Ds", "short_tokens"), "--short-col"),
    "long_tokens": (("Dl", "long_tokens"), "--long-col"),
    "log_longppl": (("loss", "log_longppl"), "--loss-col"),
    "longppl": (("longppl",), "--ppl-col"),
    "log_longppl_se": (("standard_error", "log_longppl_se"), "--error-col"),
    "scale": (("scale",), "--scale-col"),
    "short_seed": (("short_seed",), "--short-seed-col"),
    "long_seed": (("long_seed",), "--long-seed-col"),
    "cluster": (("cluster",), "--cluster"),
}
_TEXTS = ("scale", "cluster")
_PLACE = re.compile(r"/observations/(\d+)(?:/(\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Columns by name with a value for each row, and what rows are called; `spelled` where numbers are text still."""

    columns: dict[str, Sequence[Any]]
    rows: Sequence[str]
    spelled: bool

    def cell(self, column: str, row: int) -> str:
        """What stands there, for a message; empty where nothing does."""
        value = self.columns[column][row]
        return "" if value is None or value == "" else f" {shown(value) if self.spelled else value}"


def import_command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv or .parquet file, one observation per row.")],
    series: Annotated[str, typer.Option("--series", metavar="NAME", help="What the results are called.")],
    protocol: Annotated[
        str, typer.Option(help="Schedule of the long stage: constant, linear_decay, or a word of your own.")
    ],
    rule: Annotated[str, typer.Option(help="How checkpoints became the models that were measured.")] = "raw",
    metric: Annotated[
        str, typer.Option(help="What the loss is: log_longppl, log_shortppl or log_ppl.")
    ] = "log_longppl",
    evaluator: Annotated[str | None, typer.Option(help="A name for how it was measured; else the series'.")] = None,
    family: Annotated[str | None, typer.Option(help="A name for the recipe; else the series'.")] = None,
    n_col: Annotated[str | None, typer.Option(help="Column of N; else N or n_params.")] = None,
    short_col: Annotated[str | None, typer.Option(help="Column of D_s; else Ds or short_tokens.")] = None,
    long_col: Annotated[str | None, typer.Option(help="Column of D_l; else Dl or long_tokens.")] = None,
    loss_col: Annotated[
        str | None, typer.Option(help="Column of log LongPPL itself, in nats; else loss or log_longppl.")
    ] = None,
    ppl_col: Annotated[str | None, typer.Option(help="Column of LongPPL, instead of a loss; else longppl.")] = None,
    error_col: Annotated[
        str | None, typer.Option(help="Column of the loss's standard error; else standard_error or log_longppl_se.")
    ] = None,
    scale_col: Annotated[str | None, typer.Option(help="Column that names the size; else scale.")] = None,
    short_seed_col: Annotated[str | None, typer.Option(help="Column of the short seed; else short_seed.")] = None,
    long_seed_col: Annotated[str | None, typer.Option(help="Column of the long seed; else long_seed.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Column that names the short checkpoint of a row; else cluster.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="The service's address; LONGLAW_URL by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Import a table of (N, D_s, D_l, log LongPPL) into the service: all of its rows, or none.

    The same description (series, protocol, rule, metric, evaluator, family) is the same series: more rows extend it,
    and rows that are there already are found again.
    """
    given = {
        "n_params": n_col,
        "short_tokens": short_col,
        "long_tokens": long_col,
        "log_longppl": loss_col,
        "longppl": ppl_col,
        "log_longppl_se": error_col,
        "scale": scale_col,
        "short_seed": short_seed_col,
        "long_seed": long_seed_col,
        "cluster": cluster,
    }
    found = _load(table)
    columns = _columns(found.columns, given)
    values = {field: _values(field, found.columns[column], spelled=found.spelled) for field, column in columns.items()}
    with Client(url) as client:
        try:
            answer = client.import_observations(
                values,
                series=series,
                protocol=protocol,
                rule=rule,
                metric=metric,
                evaluator=evaluator,
                family=family,
            )
        except ApiProblem as problem:
            raise (_in_table(problem, found, columns) if problem.places else problem) from None
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        _print(answer, [name for name in found.columns if name not in columns.values()], Console())


def _print(answer: ObservationsImported, unread: Sequence[str], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(f"{answer.inserted:,} rows imported, {answer.found_again:,} found again: {answer.label}")
    say(f"series {answer.series_id}, {answer.points:,} distinct points")
    say(answer.note or "The scheduler fits the law to them next; `longlaw predict --series` then answers.")
    if unread:
        say(f"columns that were not read: {', '.join(name or '(without a name)' for name in unread)}")


def _columns(table: Mapping[str, Any], given: Mapping[str, str | None]) -> dict[str, str]:
    """Which column holds which field.

    Raises:
        LonglawError: a column is not there, or nobody can tell which of two is meant.
    """
    columns: dict[str, str] = {}
    for field, (names, option) in _NAMES.items():
        wanted = given[field]
        present = [name for name in names if name in table] if wanted is None else [wanted]
        if len(present) > 1:
            raise LonglawError(f"{' and '.join(present)} may both be {field}: choose one with {option}")
        if wanted is not None and wanted not in table:
            raise LonglawError(f"no column named {wanted} ({option}); the table has: {', '.join(table)}")
        if present:
            columns[field] = present[0]
    for field, other in (("log_longppl", "longppl"), ("longppl", "log_longppl")):
        if given[field] is not None and given[other] is None:
            columns.pop(other, None)
    if "log_longppl" in columns and "longppl" in columns:
        both = f"{columns['log_longppl']} and {columns['longppl']}"
        raise LonglawError(f"{both} are both there: choose one with --loss-col or --ppl-col")
    for column in dict.fromkeys(columns.values()):
        meant = [field for field, taken in columns.items() if taken == column]
        if len(meant) > 1:
            options = " and ".join(_NAMES[field][1] for field in meant)
            raise LonglawError(f"{column} cannot be {' and '.join(meant)} at once: see {options}")
    missing = [field for field in ("n_params", "long_tokens") if field not in columns]
    if "log_longppl" not in columns and "longppl" not in columns:
        missing.append("log_longppl")
    if missing:
        told = "; ".join(f"{' or '.join(_NAMES[field][0])} ({_NAMES[field][1]})" for field in missing)
        raise LonglawError(f"no column named {told}; the table has: {', '.join(table)}")
    return columns


def _values(field: str, values: Sequence[Any], *, spelled: bool) -> list[Any]:
    """Labels as text, also where a table has numbers for them; of text the numbers that it spells."""
    if spelled:
        filled = (cell if cell.strip() else None for cell in values)
        read = plain_text if field in _TEXTS else lambda cell: number(cell.strip())
        return [cell if cell is None else read(cell) for cell in filled]
    return [value if value is None or field not in _TEXTS else str(value) for value in values]


def _in_table(problem: ApiProblem, table: _Table, columns: dict[str, str]) -> ApiProblem:
    """The problem with rows and columns as the table has them."""

    def place(found: re.Match[str]) -> str:
        row = int(found[1])
        if found[2] not in columns:
            return table.rows[row]
        column = columns[found[2]]
        return f"{table.rows[row]}, {column}{table.cell(column, row)}"

    def told(text: str) -> str:
        return _PLACE.sub(place, text)

    return ApiProblem(
        type=problem.type,
        title=problem.title,
        status=problem.status,
        detail=told(problem.detail),
        places=tuple(ProblemPlace(where=told(place.where), message=told(place.message)) for place in problem.places),
        retry_after_s=problem.retry_after_s,
    )


def _load(path: Path) -> _Table:
    """The columns of a file.

    Raises:
        LonglawError: it cannot be read, is no table, or has two columns of a name.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise LonglawError(f"{path} is neither .csv nor .parquet")
    names, columns, rows = _csv(path) if suffix == ".csv" else _parquet(path)
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise LonglawError(f"{path} has several columns named {', '.join(doubled) or '(without a name)'}")
    return _Table(columns=dict(zip(names, columns, strict=True)), rows=rows, spelled=suffix == ".csv")


def _csv(path: Path) -> tuple[list[str], list[Sequence[str]], list[str]]:
    try:
        (_, header), *rest = list(records(path.read_bytes().decode("utf-8-sig"))) or [(1, [])]
    except UnicodeDecodeError as error:
        raise LonglawError(f"cannot read {path}: it is not UTF-8 (byte {error.start})") from None
    except (OSError, csv.Error) as error:
        raise LonglawError(f"cannot read {path}: {error}") from None
    if not header:
        raise LonglawError(f"cannot read {path}: it is empty")
    if hint := separator_hint(header):
        raise LonglawError(f"cannot read {path}: its header is {shown(header[0])}{hint}")
    for line, cells in rest:
        if len(cells) != len(header):
            raise LonglawError(f"cannot read {path}: line {line} {wrong_number_of_cells(cells, header)}")
    columns: list[Sequence[str]] = [[cells[at] for _, cells in rest] for at in range(len(header))]
    return [name.strip() for name in header], columns, [f"line {line}" for line, _ in rest]


def _parquet(path: Path) -> tuple[list[str], list[Sequence[Any]], list[str]]:
    import pyarrow
    from pyarrow import parquet  # heavy

    try:
        found = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise LonglawError(f"cannot read {path}: {error}") from None
    columns: list[Sequence[Any]] = []
    for column in found.columns:
        values = column.to_pylist()
        if pyarrow.types.is_float16(column.type) or pyarrow.types.is_float32(column.type):
            short = column.type.to_pandas_dtype()  # which tells that a count may have been rounded
            values = [value if value is None else short(value) for value in values]
        columns.append(values)
    return [name.strip() for name in found.column_names], columns, [f"row {row}" for row in range(1, len(found) + 1)]
