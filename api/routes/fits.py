"""Fits: never changed once they have ended, so their details may be cached for ever."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api import conditional
from api.dependencies import ResourceId, Sessions
from api.errors import ResourceNotFoundError
from api.models import FitDetail, FitState, FitSummary, Page
from api.paging import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor, time_key
from database.reading import reading
from database.reading_fits import fit_standing, list_fits

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


@router.get("/fits/{fit_id}", response_model=FitDetail, responses=conditional.NOT_MODIFIED)
def get_fit(fit_id: ResourceId, sessions: Sessions, request: Request) -> FitDetail | Response:
    """One fit: parameters, intervals, how well it holds, and every observation it used.

    Once it has ended the answer carries an ETag, and `If-None-Match` with it gets a 304.
    """
    with reading(sessions) as session:
        standing = fit_standing(session, fit_id)
    if standing is None:
        raise ResourceNotFoundError(f"There is no fit {fit_id}.")
    fit = FitDetail.of(standing.fit, standing)
    if fit.state not in ("SUCCEEDED", "FAILED"):
        return fit
    return conditional.immutable(request, fit.model_dump_json().encode())
