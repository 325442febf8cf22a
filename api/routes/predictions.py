"""Predictions: what a fit says at any (N, D_s, D_l), one point or a million."""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from api import conditional, csv_export
from api.dependencies import Sessions, body_up_to, media_type
from api.errors import (
    FitNotReadyError,
    ResourceNotFoundError,
    SeriesAmbiguousError,
    TooFewObservationsError,
    UnsupportedMediaTypeError,
)
from api.json_body import read_json
from api.models import Predictions
from api.models_predictions import PredictionRequest
from api.openapi import body_schema
from api.prediction_answers import csv_chunks, json_chunks
from database.fits import StoredFit, latest_fit, load_fit
from database.reading import distinct_points, reading, series_labels
from database.reading_fits import fit_record
from fitting.laws import LONG_CONTEXT
from orchestrator.errors import Problem

MAX_BODY_BYTES = 96 * 1024 * 1024  # three lists of a million numbers with all their digits

router = APIRouter(prefix="/v1", tags=["predictions"])


def _wanted(request: Request, body: Annotated[bytes, Depends(body_up_to(MAX_BODY_BYTES))]) -> PredictionRequest:
    kind = media_type(request)
    if kind != "application/json":
        raise UnsupportedMediaTypeError(f"Send the request as application/json, not {kind or 'untyped'}.")
    return read_json(PredictionRequest, body)


@router.post(
    "/predictions",
    response_class=StreamingResponse,
    responses={
        200: {
            "model": Predictions,
            "content": {csv_export.MEDIA_TYPE: {"schema": {"type": "string"}}},
            "description": "One prediction for each point, in the order asked.",
        }
    },
    openapi_extra=body_schema(PredictionRequest),
)
def predict_points(
    wanted: Annotated[PredictionRequest, Depends(_wanted)],
    sessions: Sessions,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> StreamingResponse:
    """What a fit says about log LongPPL, with intervals, and how far each point lies outside what was fitted.

    With `Accept: text/csv` the points as one table; the header `Link` then says which fit they are of.
    """
    with reading(sessions) as session:
        stored = _find_fit(session, wanted)
        record = fit_record(session, stored.fit_id)
    assert record is not None
    at = wanted.at.columns()
    if csv_export.MEDIA_TYPE in accept:
        answer = csv_export.table_response(csv_chunks(stored.law, at, level=wanted.level), filename="predictions.csv")
    else:
        head = Predictions(
            fit_id=str(stored.fit_id),
            series_id=stored.series_id,
            law=stored.law.law,
            status=record.status,
            level=wanted.level,
            warnings=record.warnings,
            predictions=(),
        )
        answer = StreamingResponse(json_chunks(head, stored.law, at), media_type="application/json")
    answer.headers["Vary"] = "Accept"
    answer.headers["Link"] = f'</v1/fits/{stored.fit_id}>; rel="describedby"'
    if wanted.fit != "latest":
        answer.headers["Cache-Control"] = conditional.IMMUTABLE
    return answer


def _find_fit(session: Session, wanted: PredictionRequest) -> StoredFit:
    """The fit that the request means."""
    if wanted.fit == "latest":
        return _latest(session, _find_series(session, wanted.series), wanted.holdout)
    try:
        fit_id = uuid.UUID(wanted.fit)
    except ValueError:
        raise ResourceNotFoundError(f"{wanted.fit!r} is neither `latest` nor the id of a fit.") from None
    stored = load_fit(session, fit_id)
    if stored is not None:
        return stored
    record = fit_record(session, fit_id)
    if record is None:
        raise ResourceNotFoundError(f"There is no fit {fit_id}.")
    raise FitNotReadyError(f"Fit {fit_id} is {record.state}" + (f": {record.reason}" if record.reason else "."))


def _find_series(session: Session, series_id: str | None) -> str:
    """The id of the series asked for, or of the only one."""
    found = series_labels(session, series_id=series_id)
    if len(found) == 1:
        return next(iter(found))
    if series_id is not None:
        raise ResourceNotFoundError(f"There is no series {series_id}.")
    if not found:
        raise TooFewObservationsError(f"need at least {LONG_CONTEXT.n_parameters} distinct observations, have 0")
    raise SeriesAmbiguousError(
        f"There are {len(found)} series; name one of them as `series`.",
        problems=[Problem(pointer="/series", message=f"{found_id}: {label}") for found_id, label in found.items()],
    )


def _latest(session: Session, series_id: str, holdout: str | None) -> StoredFit:
    """The newest successful fit of a series."""
    stored = latest_fit(session, series_id, holdout=holdout)
    if stored is not None:
        return stored
    needed = LONG_CONTEXT.n_parameters
    have = distinct_points(session, series_id)
    if have < needed:
        raise TooFewObservationsError(f"need at least {needed} distinct observations, have {have} (series {series_id})")
    what = "no successful fit" if holdout is None else f"no successful fit that held {holdout} out"
    raise FitNotReadyError(f"Series {series_id} has {what} yet; `GET /v1/fits?series={series_id}` lists its fits.")
