"""Tables of observations to import, as CSV: each row with the line that it stands on.

Columns are the fields of an imported observation. A header may also call them what `longlaw fit` does, and the columns
that an export of ours has beside them are passed over, so that an export can be imported.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from api.cells import number, plain_text, records, separator_hint, shown, wrong_number_of_cells
from api.errors import InvalidRequestError, LineProblem, MalformedBodyError, message_of
from api.models_imports import MAX_ROWS, ImportedObservation

_ALSO_CALLED = {
    "N": "n_params",
    "Ds": "short_tokens",
    "Dl": "long_tokens",
    "loss": "log_longppl",
    "standard_error": "log_longppl_se",
}
_PASSED_OVER = frozenset({"id", "series_id", "evaluation_id", "source", "created_at"})
_TEXTS = frozenset({"scale", "cluster"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row and the line it begins on, from 1, the header's included."""

    line: int
    observation: ImportedObservation


def read_table(body: bytes) -> tuple[TableRow, ...]:
    """All rows of a table.

    Raises:
        MalformedBodyError: the body is not UTF-8, or no CSV.
        InvalidRequestError: the header or rows cannot be used; every one of them is named.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedBodyError(f"The body is not UTF-8: byte {error.start} cannot be read.") from None
    try:
        (line, header), *rest = list(records(text)) or [(1, [])]
    except csv.Error as error:
        raise MalformedBodyError(f"{error}.") from None
    columns = _columns(line, header)
    if not rest:
        raise InvalidRequestError("The table has no rows.")
    if len(rest) > MAX_ROWS:
        raise InvalidRequestError(f"The table has {len(rest):,} rows; one import takes at most {MAX_ROWS:,} rows.")
    rows: list[TableRow] = []
    problems: list[LineProblem] = []
    for line, cells in rest:
        row = _row(line, columns, cells)
        if isinstance(row, TableRow):
            rows.append(row)
        else:
            problems += row
    if problems:
        n_bad = len(rest) - len(rows)
        raise InvalidRequestError(
            f"{problems[0]}. {n_bad:,} of {len(rest):,} rows cannot be imported; nothing was stored.",
            problems=problems,
        )
    return tuple(rows)


def _columns(line: int, header: Sequence[str]) -> list[str | None]:
    """What each column holds, by the names of the fields; None for those that are passed over."""
    fields = ImportedObservation.model_fields
    named = [name.strip() for name in header]
    columns = [_ALSO_CALLED.get(name, name) for name in named]
    messages = []
    for name, column in zip(named, columns, strict=True):
        if column not in fields and column not in _PASSED_OVER:
            hint = separator_hint(header) if name else " (an index? write the table without it)"
            messages.append(f"{name!r} is no column of observations{hint}; they are {', '.join(fields)}")
    for column in dict.fromkeys(columns):
        if columns.count(column) > 1:
            messages.append(f"{column} is given {columns.count(column)} times")
    required = (name for name, field in fields.items() if field.is_required())
    messages += [f"there is no column {name}" for name in required if name not in columns]
    if "log_longppl" not in columns and "longppl" not in columns:
        messages.append("there is no column log_longppl or longppl")
    if messages:
        problems = [LineProblem(line=line, message=message) for message in messages]
        raise InvalidRequestError(f"The header cannot be used: {messages[0]}.", problems=problems)
    return [None if column in _PASSED_OVER else column for column in columns]


def _row(line: int, columns: Sequence[str | None], cells: Sequence[str]) -> TableRow | list[LineProblem]:
    if len(cells) != len(columns):
        return [LineProblem(line=line, message=wrong_number_of_cells(cells, columns))]
    values = {
        column: plain_text(cell) if column in _TEXTS else number(cell.strip())
        for column, cell in zip(columns, cells, strict=True)
        if column is not None and cell.strip()
    }
    try:
        return TableRow(line=line, observation=ImportedObservation.model_validate(values))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        return [LineProblem(line=line, message=_message(item, values)) for item in found]


def _message(item: Mapping[str, Any], values: Mapping[str, object]) -> str:
    """What is wrong with a row or a cell; also what the cell holds, where that is no number of the right kind."""
    column = ": ".join(map(str, item["loc"]))
    message = f"{column}: {message_of(item)}" if column else message_of(item)
    return f"{message}, not {shown(values[column])}" if item["type"] in ("int_type", "float_type") else message
