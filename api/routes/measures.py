"""What is kept beside the fitted numbers of a grid: how training went, and what probes found."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session, sessionmaker

from api import csv_export
from api.dependencies import ResourceId, Sessions
from api.errors import ResourceNotFoundError
from api.models import Page
from api.models_measures import ProbeMetric, TrainingSeries
from api.paging import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor
from database.measures import MAX_POINTS, MetricRecord, list_metrics, training_series
from database.reading import grid_exists, reading

#: A segment may bring a thousand points, so a page holds fewer of them than other lists do of their rows.
MAX_SEGMENTS = 100
_DEFAULT_SEGMENTS = 20
_CSV_PAGE = 1000

Scale = Annotated[str | None, Query(description="Of this scale only.")]

router = APIRouter(prefix="/v1", tags=["measures"])


@router.get("/grids/{grid_id}/training")
def get_training(
    grid_id: ResourceId,
    sessions: Sessions,
    scale: Scale = None,
    points: Annotated[
        int,
        Query(ge=2, le=MAX_POINTS, description="Points of a segment at most, its first and its last among them."),
    ] = MAX_POINTS,
    limit: Annotated[int, Query(ge=1, le=MAX_SEGMENTS, description="Segments per page.")] = _DEFAULT_SEGMENTS,
    cursor: Cursor = None,
) -> Page[TrainingSeries]:
    """How training of a grid's segments went, those that have begun, parents before what goes on from them."""
    scope = ("training", grid_id, scale)
    after = decode_cursor(cursor, (int,), scope)
    with reading(sessions) as session:
        _require(session, grid_id)
        rows = training_series(
            session,
            grid_id,
            scale=scale,
            after=None if after is None else int(after[0]),
            limit=limit + 1,
            max_points=points,
        )
    following = encode_cursor((rows[limit - 1].id,), scope) if len(rows) > limit else None
    return Page(items=tuple(TrainingSeries.of(row) for row in rows[:limit]), next_cursor=following)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Which numbers of which grid."""

    grid: uuid.UUID
    metric: str | None
    scale: str | None

    @property
    def scope(self) -> tuple[object, ...]:
        return ("metrics", self.grid, self.metric, self.scale)

    def rows(self, session: Session, *, after: int | None, limit: int) -> list[MetricRecord]:
        return list_metrics(session, self.grid, name=self.metric, scale=self.scale, after=after, limit=limit)


def _selection(
    grid_id: ResourceId,
    metric: Annotated[str | None, Query(description="Of this metric only, such as `passkey_accuracy`.")] = None,
    scale: Scale = None,
) -> _Selection:
    return _Selection(grid=grid_id, metric=metric, scale=scale)


@router.get(
    "/grids/{grid_id}/metrics",
    response_model=Page[ProbeMetric],
    responses={200: {"content": {csv_export.MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
def get_metrics(
    selection: Annotated[_Selection, Depends(_selection)],
    sessions: Sessions,
    response: Response,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Page[ProbeMetric] | StreamingResponse:
    """Numbers of a grid's probes. With `Accept: text/csv` all of them as one table, whatever the limit."""
    response.headers["Vary"] = "Accept"
    key = decode_cursor(cursor, (int,), selection.scope)
    as_csv = csv_export.MEDIA_TYPE in accept
    with reading(sessions) as session:
        _require(session, selection.grid)
        rows = [] if as_csv else selection.rows(session, after=None if key is None else int(key[0]), limit=limit + 1)
    if as_csv:
        return csv_export.csv_response(ProbeMetric, _pages(selection, sessions), filename="metrics.csv")
    following = encode_cursor((rows[limit - 1].id,), selection.scope) if len(rows) > limit else None
    return Page(items=tuple(_metric(row) for row in rows[:limit]), next_cursor=following)


def _require(session: Session, grid_id: uuid.UUID) -> None:
    if not grid_exists(session, grid_id):
        raise ResourceNotFoundError(f"There is no grid {grid_id}.")


def _metric(row: MetricRecord) -> ProbeMetric:
    return ProbeMetric(
        id=str(row.id),
        evaluation_id=row.evaluation,
        segment=row.segment,
        step=row.step,
        rule=row.rule,
        follow_up=row.follow_up,
        scale=row.scale,
        n_params=row.n_params,
        short_tokens=row.short_tokens,
        long_tokens=row.long_tokens,
        short_seed=row.short_seed,
        long_seed=row.long_seed,
        metric=row.metric.name,
        value=row.metric.value,
        count=row.metric.count,
        length=row.metric.length,
        depth=row.metric.depth,
        label=row.metric.label,
    )


def _pages(selection: _Selection, sessions: sessionmaker[Session]) -> Iterator[list[ProbeMetric]]:
    """All rows, a page at a time: while a slow client reads, no connection is held."""
    after: int | None = None
    while True:
        with reading(sessions) as session:
            rows = selection.rows(session, after=after, limit=_CSV_PAGE)
        if not rows:
            return
        yield [_metric(row) for row in rows]
        after = rows[-1].id
