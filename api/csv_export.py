"""Rows as CSV (RFC 4180), streamed. What a spreadsheet would run as a formula leaves as text."""

from __future__ import annotations

import csv
import datetime as dt
import io
from collections.abc import Iterable, Iterator, Sequence

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.cells import inert_text

MEDIA_TYPE = "text/csv"


def csv_chunks(model: type[BaseModel], pages: Iterable[Sequence[BaseModel]]) -> Iterator[str]:
    """A header line with the model's fields, then the rows, one piece of text for each page of them."""
    yield _text([list(model.model_fields)])
    for page in pages:
        yield _text([[_cell(value) for _, value in row] for row in page])


def _cell(value: object) -> object:
    """Numbers in their shortest exact form, times in RFC 3339, None as nothing, text made inert with an apostrophe."""
    if isinstance(value, str):
        return inert_text(value)
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value


def _text(rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows(rows)
    return buffer.getvalue()


def csv_response(model: type[BaseModel], pages: Iterable[Sequence[BaseModel]], *, filename: str) -> StreamingResponse:
    """All rows as one table that is sent while it is read."""
    return table_response(csv_chunks(model, pages), filename=filename)


def table_response(chunks: Iterable[str | bytes], *, filename: str) -> StreamingResponse:
    """A table that is sent while it is made."""
    headers = {"Vary": "Accept", "Content-Disposition": f'attachment; filename="{filename}"'}
    return StreamingResponse(chunks, media_type=MEDIA_TYPE, headers=headers)
