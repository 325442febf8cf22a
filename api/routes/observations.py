"""Observations and the series that they belong to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session, sessionmaker

from api import csv_export
from api.dependencies import Sessions
from api.models import Observation, Page, Series
from api.paging import DEFAULT_LIMIT, Cursor, KeyPart, Limit, decode_cursor, encode_cursor
from database.reading import ObservationRecord, list_observations, list_series, reading

_CSV_PAGE = 1000

router = APIRouter(prefix="/v1", tags=["observations"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Which observations, in which order."""

    series: str | None
    grid: uuid.UUID | None
    scale: str | None
    sort: Literal["id", "log_longppl"]

    @property
    def scope(self) -> tuple[object, ...]:
        return ("observations", self.series, self.grid, self.scale, self.sort)

    def key(self, row: ObservationRecord) -> tuple[KeyPart, ...]:
        return (row.id,) if self.sort == "id" else (row.log_longppl, row.id)

    def rows(
        self, sessions: sessionmaker[Session], *, after: tuple[KeyPart, ...] | None, limit: int
    ) -> list[ObservationRecord]:
        with reading(sessions) as session:
            return list_observations(
                session,
                series_id=self.series,
                grid_id=self.grid,
                scale=self.scale,
                order=self.sort,
                after=after,
                limit=limit,
            )


def _selection(
    series: Annotated[str | None, Query(description="Of this series only.")] = None,
    grid: Annotated[uuid.UUID | None, Query(description="Only what cells of this grid asked for.")] = None,
    scale: Annotated[str | None, Query(description="Of this scale only.")] = None,
    sort: Annotated[Literal["id", "log_longppl"], Query(description="Ascending; ties by id.")] = "id",
) -> _Selection:
    return _Selection(series=series, grid=grid, scale=scale, sort=sort)


@router.get(
    "/observations",
    response_model=Page[Observation],
    responses={200: {"content": {csv_export.MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
def get_observations(
    selection: Annotated[_Selection, Depends(_selection)],
    sessions: Sessions,
    response: Response,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Page[Observation] | StreamingResponse:
    """The rows that laws are fitted to. With `Accept: text/csv` all of them as one table, whatever the limit."""
    response.headers["Vary"] = "Accept"
    after = decode_cursor(cursor, (int,) if selection.sort == "id" else (float, int), selection.scope)
    if csv_export.MEDIA_TYPE in accept:
        return csv_export.csv_response(Observation, _pages(selection, sessions), filename="observations.csv")
    rows = selection.rows(sessions, after=after, limit=limit + 1)
    following = encode_cursor(selection.key(rows[limit - 1]), selection.scope) if len(rows) > limit else None
    return Page(items=tuple(Observation.of(row) for row in rows[:limit]), next_cursor=following)


@router.get("/series")
def get_series(sessions: Sessions) -> Page[Series]:
    """Everything that can be fitted; one page holds them all."""
    with reading(sessions) as session:
        rows = list_series(session)
    return Page(items=tuple(Series.of(row) for row in rows), next_cursor=None)


def _pages(selection: _Selection, sessions: sessionmaker[Session]) -> Iterator[list[Observation]]:
    """All rows, a page at a time: while a slow client reads, no connection is held."""
    after: tuple[KeyPart, ...] | None = None
    while rows := selection.rows(sessions, after=after, limit=_CSV_PAGE):
        yield [Observation.of(row) for row in rows]
        after = selection.key(rows[-1])
