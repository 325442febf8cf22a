"""Fits: never changed once they have ended, so their details may be cached for ever."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.dependencies import ResourceId, Sessions
from api.errors import ResourceNotFoundError
from api.models import FitDetail, FitState, FitSummary, Page
from api.paging import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor, time_key
from database.reading import reading
from database.reading_fits import fit_standing, list_fits

IMMUTABLE = "public, max-age=31536000, immutable"

router = APIRouter(prefix="/v1", tags=["fits"])


@router.get("/fits")
def get_fits(
    sessions: Sessions,
    series: Annotated[str | None, Query(description="Of this series only.")] = None,
    state: Annotated[FitState | None, Query(description="In this state only.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    cursor: Cursor = None,
) -> Page[FitSummary]:
    """Fits, newest first."""
    scope = ("fits", series, state)
    after = time_key(decode_cursor(cursor, (str, str), scope))
    with reading(sessions) as session:
        rows = list_fits(session, series_id=series, state=state, after=after, limit=limit + 1)
    items = tuple(FitSummary.of(row) for row in rows[:limit])
    last = rows[limit - 1] if len(rows) > limit else None
    following = encode_cursor((last.created_at.isoformat(), str(last.id)), scope) if last else None
    return Page(items=items, next_cursor=following)


@router.get("/fits/{fit_id}")
def get_fit(fit_id: ResourceId, sessions: Sessions, response: Response) -> FitDetail:
    """One fit: parameters, intervals, how well it holds, and every observation it used."""
    with reading(sessions) as session:
        standing = fit_standing(session, fit_id)
    if standing is None:
        raise ResourceNotFoundError(f"There is no fit {fit_id}.")
    if standing.fit.state in ("SUCCEEDED", "FAILED"):
        response.headers["Cache-Control"] = IMMUTABLE
    return FitDetail.of(standing.fit, standing)
