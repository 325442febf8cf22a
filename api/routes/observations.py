"""Observations and the series that they belong to."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from api.dependencies import Sessions
from api.models import Observation, Page, Series
from api.paging import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor
from database.reading import list_observations, list_series, reading

router = APIRouter(prefix="/v1", tags=["observations"])


@router.get("/observations")
def get_observations(
    sessions: Sessions,
    series: Annotated[str | None, Query(description="Of this series only.")] = None,
    grid: Annotated[uuid.UUID | None, Query(description="Only what cells of this grid asked for.")] = None,
    scale: Annotated[str | None, Query(description="Of this scale only.")] = None,
    sort: Annotated[Literal["id", "log_longppl"], Query(description="Ascending; ties by id.")] = "id",
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[Observation]:
    """The rows that laws are fitted to."""
    scope = ("observations", series, grid, scale, sort)
    kinds = (int,) if sort == "id" else (float, int)
    after = decode_cursor(cursor, kinds, scope)
    with reading(sessions) as session:
        rows = list_observations(
            session, series_id=series, grid_id=grid, scale=scale, order=sort, after=after, limit=limit + 1
        )
    items = tuple(Observation.of(row) for row in rows[:limit])
    following = None
    if len(rows) > limit:
        last = rows[limit - 1]
        following = encode_cursor((last.id,) if sort == "id" else (last.log_longppl, last.id), scope)
    return Page(items=items, next_cursor=following)


@router.get("/series")
def get_series(sessions: Sessions) -> Page[Series]:
    """Everything that can be fitted; one page holds them all."""
    with reading(sessions) as session:
        rows = list_series(session)
    return Page(items=tuple(Series.of(row) for row in rows), next_cursor=None)
