"""Fits for those who look: lists, and one fit with its parameters and the observations it used."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, select, tuple_
from sqlalchemy.orm import Session

from database.models import Fit, FitObservation, FitParameter, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutRecord:
    """How a fit predicts what it has not seen; MAPE in percent, bias in nats; no numbers before the fit has ended."""

    selection: str
    n_observations: int | None
    r2: float | None
    mape_log: float | None
    mape_ppl: float | None
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """A fit as lists show it."""

    id: uuid.UUID
    series_id: str
    law: str
    state: str
    reason: str | None
    status: str | None
    created_at: dt.datetime
    ended_at: dt.datetime | None
    n_observations: int | None
    n_clusters: int | None
    objective: float | None
    residual_std: float | None
    r2: float | None
    mape_log: float | None
    warnings: tuple[str, ...]
    holdout: HoldoutRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """A parameter with its bootstrap interval, None where that is withheld."""

    name: str
    value: float
    low: float | None
    high: float | None
    at_bound: bool
    identifiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangesRecord:
    """The span of each axis over the fitted observations."""

    n_params: SpanRecord
    short_tokens: SpanRecord
    long_tokens: SpanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FitObservationRecord:
    """An observation, its role in a fit (None until that has succeeded), and what the fit says there."""

    id: int
    role: str | None
    reason: str | None
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    log_longppl: float
    predicted: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStanding:
    """A fit with all that can be shown of it."""

    fit: FitRecord
    bootstrap: int
    level: float | None
    huber_delta: float | None
    gradient_norm: float | None
    parameters: tuple[ParameterRecord, ...]
    ranges: RangesRecord | None
    explanation: tuple[str, ...]
    observations: tuple[FitObservationRecord, ...]


def list_fits(
    session: Session,
    *,
    series_id: str | None = None,
    state: str | None = None,
    after: tuple[dt.datetime, uuid.UUID] | None,
    limit: int,
) -> list[FitRecord]:
    """Fits, newest first. Sort key: `created_at`, `id`."""
    statement: Select[Fit] = select(Fit).order_by(Fit.created_at.desc(), Fit.id.desc()).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(Fit.created_at, Fit.id) < after)
    if series_id is not None:
        statement = statement.where(Fit.series_id == series_id)
    if state is not None:
        statement = statement.where(Fit.state == state)
    return [_fit(row) for row in session.scalars(statement)]


def fit_record(session: Session, fit_id: uuid.UUID) -> FitRecord | None:
    """One fit as lists show it; None where there is none of that id."""
    row = session.get(Fit, fit_id)
    return None if row is None else _fit(row)


def fit_standing(session: Session, fit_id: uuid.UUID) -> FitStanding | None:
    """One fit in full; None where there is none of that id."""
    row = session.get(Fit, fit_id)
    if row is None:
        return None
    parameters = select(FitParameter).where(FitParameter.fit_id == fit_id).order_by(FitParameter.position)
    return FitStanding(
        fit=_fit(row),
        bootstrap=row.bootstrap,
        level=row.level,
        huber_delta=row.huber_delta,
        gradient_norm=row.gradient_norm,
        parameters=tuple(
            ParameterRecord(
                name=item.name,
                value=item.value,
                low=item.low,
                high=item.high,
                at_bound=item.at_bound,
                identifiable=item.identifiable,
            )
            for item in session.scalars(parameters)
        ),
        ranges=_ranges(row),
        explanation=tuple(str(item) for item in row.explanation or ()),
        observations=_observations(session, fit_id),
    )


def _observations(session: Session, fit_id: uuid.UUID) -> tuple[FitObservationRecord, ...]:
    statement = (
        select(FitObservation, Observation)
        .join(Observation, Observation.id == FitObservation.observation_id)
        .where(FitObservation.fit_id == fit_id)
        .order_by(Observation.n_params, Observation.short_tokens, Observation.long_tokens, Observation.id)
    )
    return tuple(
        FitObservationRecord(
            id=row.id,
            role=use.role,
            reason=use.reason,
            scale=row.scale,
            n_params=row.n_params,
            short_tokens=row.short_tokens,
            long_tokens=row.long_tokens,
            short_seed=row.short_seed,
            long_seed=row.long_seed,
            log_longppl=row.y,
            predicted=use.predicted,
            low=use.low,
            high=use.high,
        )
        for use, row in session.execute(statement)
    )


def _fit(row: Fit) -> FitRecord:
    holdout = None
    if row.holdout is not None:
        holdout = HoldoutRecord(
            selection=row.holdout,
            n_observations=row.holdout_n,
            r2=row.holdout_r2,
            mape_log=row.holdout_mape_log,
            mape_ppl=row.holdout_mape_ppl,
            bias=row.holdout_bias,
        )
    return FitRecord(
        id=row.id,
        series_id=row.series_id,
        law=row.law,
        state=row.state,
        reason=row.reason,
        status=row.status,
        created_at=row.created_at,
        ended_at=row.ended_at,
        n_observations=row.n_observations,
        n_clusters=row.n_clusters,
        objective=row.objective,
        residual_std=row.residual_std,
        r2=row.r2,
        mape_log=row.mape_log,
        warnings=tuple(str(item) for item in row.warnings or ()),
        holdout=holdout,
    )


def _ranges(row: Fit) -> RangesRecord | None:
    def span(low: Any, high: Any) -> SpanRecord | None:
        return None if low is None or high is None else SpanRecord(low=low, high=high)

    n_params = span(row.n_params_min, row.n_params_max)
    short = span(row.short_tokens_min, row.short_tokens_max)
    long = span(row.long_tokens_min, row.long_tokens_max)
    if n_params is None or short is None or long is None:
        return None
    return RangesRecord(n_params=n_params, short_tokens=short, long_tokens=long)
