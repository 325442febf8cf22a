"""Fits: queued when a series has new observations, claimed by one process, stored once, read back for predictions.

A fit's observations are frozen when it is queued: its rows in `fit_observations`. Running it again from them gives the
same parameters. When it is done, a trigger refuses every further change.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from sqlalchemy import Select, func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.orm import Session

from database.events import record_event
from database.models import Fit, FitDraw, FitObservation, FitParameter, Observation
from fitting import values
from fitting.laws import LONG_CONTEXT, law_named

DEFAULT_BOOTSTRAP = 200
_DRAW_COLUMNS = ("amplitude_n", "alpha", "amplitude_s", "beta_s", "amplitude_l", "beta_l", "offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesObservation:
    """An observation as a law is fitted to it; D_s is None where nobody knows it."""

    id: int
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    cluster: str
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitJob:
    """A fit to do: the law, its frozen observations, and the selection that it must not see."""

    fit_id: uuid.UUID
    series_id: str
    law: str
    holdout: str | None
    bootstrap: int
    observations: tuple[SeriesObservation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitUse:
    """What a fit made of an observation: its role, why it was excluded, and the law's value and interval there."""

    observation_id: int
    role: str
    reason: str | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FitResult:
    """What a fit came to: its numbers, the same in words, and what it says of each of its observations."""

    fit: values.Fit
    explanation: tuple[str, ...]
    uses: tuple[FitUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredFit:
    """A finished fit as far as predictions need it; `fitting.predict` takes its `law`."""

    fit_id: uuid.UUID
    series_id: str
    holdout: str | None
    law: values.FittedLaw


def held_out(observations: Sequence[SeriesObservation], selection: str | None) -> list[bool]:
    """Which observations a grid's `fit.holdout` keeps from the fit.

    `scale=NAME` names a scale; `long_tokens=largest` the largest D_l of every scale, whatever its count there.

    Raises:
        ValueError: another selection.
    """
    if selection is None:
        return [False] * len(observations)
    if selection == "long_tokens=largest":
        largest: dict[str, int] = {}
        for row in observations:
            largest[row.scale] = max(row.long_tokens, largest.get(row.scale, 0))
        return [row.long_tokens == largest[row.scale] for row in observations]
    column, _, name = selection.partition("=")
    if column != "scale" or not name:
        raise ValueError(f"holdout {selection!r} is neither scale=NAME nor long_tokens=largest")
    return [row.scale == name for row in observations]


# Observations are only ever added, so a fit has seen all of a series when it has as many. (Comparing the newest ids
# would miss a row whose transaction took its id early and committed late.)
_STALE = text("""
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT ce.series_id, c.grid_id FROM cell_evaluations ce JOIN cells c ON c.id = ce.cell_id
    ), wanted AS (
        SELECT series_id, holdout, max(bootstrap) AS bootstrap
        FROM (
            SELECT id, NULL, NULL::bigint FROM series
            UNION ALL
            SELECT a.series_id, wish.holdout, g.bootstrap
            FROM asked a JOIN grids g ON g.id = a.grid_id
            CROSS JOIN LATERAL (VALUES (NULL), (g.holdout)) wish (holdout)
        ) wish (series_id, holdout, bootstrap)
        GROUP BY series_id, holdout
    ), seen AS MATERIALIZED (
        SELECT
            s.id AS series_id,
            (SELECT count(*) FROM observations WHERE series_id = s.id) AS count,
            (
                SELECT created_at FROM observations WHERE series_id = s.id ORDER BY series_id DESC, id DESC LIMIT 1
            ) AS newest
        FROM series s
    )
    SELECT w.series_id, w.holdout, coalesce(w.bootstrap, :default_bootstrap) AS bootstrap
    FROM wanted w
    JOIN seen ON seen.series_id = w.series_id
    LEFT JOIN LATERAL (
        SELECT f.state, (SELECT count(*) FROM fit_observations WHERE fit_id = f.id) AS count
        FROM fits f
        WHERE f.series_id = w.series_id AND f.law = :law AND f.holdout IS NOT DISTINCT FROM w.holdout
        ORDER BY f.created_at DESC, f.id DESC LIMIT 1
    ) fitted ON true
    WHERE seen.count >= :minimum
        AND (fitted.state IS NULL OR (fitted.state IN ('SUCCEEDED', 'FAILED') AND fitted.count < seen.count))
        AND (
            seen.newest <= now() - make_interval(secs => :debounce_s)
            OR NOT EXISTS (
                SELECT FROM cell_evaluations ce JOIN evaluations e ON e.key = ce.evaluation_key
                WHERE ce.series_id = w.series_id AND e.state IN ('PENDING', 'READY', 'RUNNING')
            )
        )
    ORDER BY w.series_id, w.holdout NULLS FIRST
""")


def queue_fits(session: Session, *, debounce_s: float) -> int:
    """Queues a fit wherever the newest one lacks observations of its series; returns how many.

    Each series gets a fit of all observations and one for every holdout of the grids that ask for it, each on its own.
    Too few distinct points to determine the law, or a holdout that selects nothing yet, queue nothing. Observations
    without D_s are no points of this law; a fit names them, as excluded.

    Args:
        debounce_s: wait until the newest observation is this old, unless no more are on their way.
    """
    minimum = LONG_CONTEXT.n_parameters
    stale = session.execute(
        _STALE,
        {
            "law": LONG_CONTEXT.name,
            "minimum": minimum,
            "debounce_s": debounce_s,
            "default_bootstrap": DEFAULT_BOOTSTRAP,
        },
    ).all()
    observations = {series_id: series_observations(session, series_id) for series_id in {row[0] for row in stale}}
    queued = 0
    for series_id, holdout, bootstrap in stale:
        rows = observations[series_id]
        usable = [row for row in rows if row.short_tokens is not None]
        apart = held_out(usable, holdout)
        points = {
            (row.n_params, row.short_tokens, row.long_tokens) for row, out in zip(usable, apart, strict=True) if not out
        }
        if len(points) < minimum or (holdout is not None and not any(apart)):
            continue
        fit_id = session.scalar(
            postgres_insert(Fit)
            .values(
                series_id=series_id,
                law=LONG_CONTEXT.name,
                holdout=holdout,
                bootstrap=bootstrap,
                last_observation_id=rows[-1].id,
            )
            .on_conflict_do_nothing()  # another process has just queued it
            .returning(Fit.id)
        )
        if fit_id is None:
            continue
        session.execute(insert(FitObservation), [{"fit_id": fit_id, "observation_id": row.id} for row in rows])
        record_event(session, "fit_queued", str(fit_id), series=series_id, holdout=holdout, observations=len(rows))
        queued += 1
    return queued


def claim_fit(session: Session) -> FitJob | None:
    """Takes the fit that has waited longest, now RUNNING; None where none waits."""
    waiting = (
        select(Fit.id)
        .where(Fit.state == "PENDING")
        .order_by(Fit.created_at, Fit.holdout.is_not(None), Fit.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    fit_id = session.scalar(update(Fit).where(Fit.id == waiting).values(state="RUNNING").returning(Fit.id))
    return None if fit_id is None else load_job(session, fit_id)


def load_job(session: Session, fit_id: uuid.UUID) -> FitJob | None:
    """A fit of any state as the job it was queued as; None where there is no such fit."""
    row = session.get(Fit, fit_id)
    if row is None:
        return None
    statement = _observations().join(FitObservation, FitObservation.observation_id == Observation.id)
    rows = session.execute(statement.where(FitObservation.fit_id == fit_id).order_by(Observation.id))
    return FitJob(
        fit_id=fit_id,
        series_id=row.series_id,
        law=row.law,
        holdout=row.holdout,
        bootstrap=row.bootstrap,
        observations=tuple(SeriesObservation(**item._mapping) for item in rows),
    )


def store_fit(session: Session, fit_id: uuid.UUID, result: FitResult) -> bool:
    """Stores what a RUNNING fit came to; False, and nothing stored, where it is not RUNNING (any more)."""
    row = session.scalar(select(Fit).where(Fit.id == fit_id, Fit.state == "RUNNING").with_for_update())
    if row is None:
        return False
    fit = result.fit
    session.execute(insert(FitParameter), _parameter_rows(fit_id, fit))
    if len(fit.draws):
        draws = (dict(zip(_DRAW_COLUMNS, draw, strict=True)) for draw in fit.draws.tolist())
        session.execute(insert(FitDraw), [{"fit_id": fit_id, "draw": i} | draw for i, draw in enumerate(draws)])
    session.execute(
        update(FitObservation),
        [{"fit_id": fit_id} | {item.name: getattr(use, item.name) for item in fields(use)} for use in result.uses],
    )
    for name in (
        "objective",
        "gradient_norm",
        "huber_delta",
        "level",
        "seed",
        "n_draws_ok",
        "jacobian_rank",
        "n_observations",
        "n_clusters",
        "residual_std",
        "r2",
        "mape_log",
    ):
        setattr(row, name, getattr(fit, name))
    for axis, span in zip(values.AXES, fit.ranges.axes, strict=True):
        setattr(row, f"{axis}_min", span.low)
        setattr(row, f"{axis}_max", span.high)
    if fit.holdout is not None:
        row.holdout_n = fit.holdout.n_observations
        row.holdout_r2 = fit.holdout.r2
        row.holdout_mape_log = fit.holdout.mape_log
        row.holdout_mape_ppl = fit.holdout.mape_ppl
        row.holdout_bias = fit.holdout.bias
    row.warnings = list(fit.warnings)
    row.explanation = list(result.explanation)
    row.status = fit.status.value
    row.state = "SUCCEEDED"
    row.ended_at = func.now()
    record_event(session, "fit_succeeded", str(fit_id), series=row.series_id, status=row.status)
    session.flush()
    return True


def _parameter_rows(fit_id: uuid.UUID, fit: values.Fit) -> list[dict[str, object]]:
    return [
        {
            "fit_id": fit_id,
            "position": position,
            "name": name,
            "value": value,
            "low": interval.low if interval is not None else None,
            "high": interval.high if interval is not None else None,
            "at_bound": name in fit.at_bound,
            "identifiable": name not in fit.not_identifiable,
        }
        for position, (name, value, interval) in enumerate(
            zip(law_named(fit.law).parameter_names, fit.parameters, fit.intervals, strict=True)
        )
    ]


def fail_fit(session: Session, fit_id: uuid.UUID, reason: str) -> bool:
    """Ends a RUNNING fit as FAILED; False where it is not RUNNING. Its series gets another with new observations."""
    series_id = session.scalar(
        update(Fit)
        .where(Fit.id == fit_id, Fit.state == "RUNNING")
        .values(state="FAILED", reason=reason, ended_at=func.now())
        .returning(Fit.series_id)
    )
    if series_id is not None:
        record_event(session, "fit_failed", str(fit_id), series=series_id, reason=reason)
    return series_id is not None


def requeue_fit(session: Session, fit_id: uuid.UUID) -> bool:
    """Puts a RUNNING fit back: its process is gone. False where it is not RUNNING."""
    requeued = update(Fit).where(Fit.id == fit_id, Fit.state == "RUNNING").values(state="PENDING")
    return session.scalar(requeued.returning(literal(True))) or False


def requeue_running_fits(session: Session) -> int:
    """Puts all RUNNING fits back, for a scheduler that takes over; returns how many.

    A process of the scheduler before may still finish one of them: the same rows and seed give it the same numbers, and
    whoever comes second stores nothing.
    """
    requeued = update(Fit).where(Fit.state == "RUNNING").values(state="PENDING").returning(literal(True))
    return len(session.scalars(requeued).all())


def latest_fit(session: Session, series_id: str, *, holdout: str | None = None) -> StoredFit | None:
    """The newest finished fit of a series that kept `holdout` apart; None before the first."""
    fit_id = session.scalar(
        select(Fit.id)
        .where(Fit.series_id == series_id, Fit.state == "SUCCEEDED", Fit.holdout.is_not_distinct_from(holdout))
        .order_by(Fit.created_at.desc(), Fit.id.desc())
        .limit(1)
    )
    return None if fit_id is None else load_fit(session, fit_id)


def load_fit(session: Session, fit_id: uuid.UUID) -> StoredFit | None:
    """What predictions need of a fit; None where no fit of that id has succeeded."""
    row = session.scalar(select(Fit).where(Fit.id == fit_id, Fit.state == "SUCCEEDED"))
    if row is None:
        return None
    parameters = session.scalars(
        select(FitParameter).where(FitParameter.fit_id == fit_id).order_by(FitParameter.position)
    ).all()
    columns = [getattr(FitDraw, name) for name in _DRAW_COLUMNS]
    draws = session.execute(select(*columns).where(FitDraw.fit_id == fit_id).order_by(FitDraw.draw)).all()
    spans = {
        axis: values.Interval(low=getattr(row, f"{axis}_min"), high=getattr(row, f"{axis}_max")) for axis in values.AXES
    }
    return StoredFit(
        fit_id=fit_id,
        series_id=row.series_id,
        holdout=row.holdout,
        law=values.FittedLaw(
            law=row.law,
            parameters=tuple(item.value for item in parameters),
            draws=np.array([tuple(draw) for draw in draws], dtype=np.float64).reshape(-1, len(columns)),
            ranges=values.Ranges(**spans),
            residual_std=row.residual_std,
            not_identifiable=tuple(item.name for item in parameters if not item.identifiable),
        ),
    )


def series_observations(session: Session, series_id: str) -> tuple[SeriesObservation, ...]:
    """The observations of a series in the order of their ids."""
    statement = _observations().where(Observation.series_id == series_id).order_by(Observation.id)
    return tuple(SeriesObservation(**row._mapping) for row in session.execute(statement))


def _observations() -> Select[Any]:
    return select(*(getattr(Observation, item.name) for item in fields(SeriesObservation)))
