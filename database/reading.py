"""Lists and details for those who look: grids, cells, observations, series, fits. Read-only, frozen records out.

Lists are keyset-paged: `after` is the sort key of the last row already seen, with a unique last part.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import and_, exists, func, select, tuple_
from sqlalchemy.orm import Session, sessionmaker

from database.models import Cell, CellEvaluation, Fit, Grid, GridEvaluation, Observation, Series
from database.progress import GridProgress, claim_of_cell, grid_progress, grid_states
from database.verbs import OPEN_GRID_STATES, Verb, legal_verbs

ObservationOrder = Literal["id", "log_longppl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRecord:
    """A grid as submitted, with its derived state; `flops` and `gpu_hours` are what its plan had to spend.

    `paused_at` is None also once a paused grid has ended.
    """

    id: uuid.UUID
    name: str
    protocol: str
    state: str
    paused_at: dt.datetime | None
    created_at: dt.datetime
    holdout: str | None
    tokens_train: int
    tokens_independent: int
    flops: float
    gpu_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStanding:
    """A grid, where it stands, the series that its measurements belong to, and what may be asked of it now."""

    grid: GridRecord
    progress: GridProgress
    series: tuple[str, ...]
    verbs: tuple[Verb, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationRecord:
    """A row that laws are fitted to."""

    id: int
    series_id: str
    evaluation_id: str | None
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    cluster: str
    log_longppl: float
    log_longppl_se: float | None
    source: str
    created_at: dt.datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRecord:
    """A series with the number of its observations and its newest successful fit that held nothing out."""

    id: str
    label: str
    family: str
    protocol: str
    rule: str
    evaluator_id: str
    metric: str
    created_at: dt.datetime
    observations: int
    latest_fit_id: uuid.UUID | None


@contextmanager
def reading(sessions: sessionmaker[Session]) -> Iterator[Session]:
    """A read-only session whose statements all see the database at one moment."""
    with sessions() as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True})
        yield session


def list_grids(session: Session, *, after: tuple[dt.datetime, uuid.UUID] | None, limit: int) -> list[GridRecord]:
    """Grids, newest first. Sort key: `created_at`, `id`."""
    key = tuple_(Grid.created_at, Grid.id)
    statement = select(Grid).order_by(Grid.created_at.desc(), Grid.id.desc()).limit(limit)
    if after is not None:
        statement = statement.where(key < after)
    rows = session.scalars(statement).all()
    states = grid_states(session, [row.id for row in rows])
    return [_grid(row, states[row.id]) for row in rows]


def grid_standing(session: Session, grid_id: uuid.UUID) -> GridStanding | None:
    """One grid with its progress; None where there is none of that id."""
    row = session.get(Grid, grid_id)
    if row is None:
        return None
    series = (
        select(CellEvaluation.series_id)
        .join(Cell, Cell.id == CellEvaluation.cell_id)
        .where(Cell.grid_id == grid_id)
        .distinct()
        .order_by(CellEvaluation.series_id)
    )
    grid = _grid(row, grid_states(session, [grid_id])[grid_id])
    cancelled = row.cancelled_at is not None
    progress = grid_progress(session, grid_id, paused=grid.paused_at is not None, cancelled=cancelled)
    failed = any(scale.evaluations["FAILED"] for scale in progress.scales)
    return GridStanding(
        grid=grid,
        progress=progress,
        series=tuple(session.scalars(series)),
        verbs=legal_verbs(grid.state, paused=grid.paused_at is not None, failed=failed),
    )


def grid_exists(session: Session, grid_id: uuid.UUID) -> bool:
    """Whether there is a grid of that id."""
    return bool(session.scalar(select(exists().where(Grid.id == grid_id))))


def grid_document(session: Session, grid_id: uuid.UUID) -> dict[str, Any] | None:
    """A grid as it was submitted; None where there is none of that id."""
    return session.scalar(select(Grid.document).where(Grid.id == grid_id))


def list_observations(
    session: Session,
    *,
    series_id: str | None = None,
    grid_id: uuid.UUID | None = None,
    scale: str | None = None,
    order: ObservationOrder = "id",
    after: tuple[str | float | int, ...] | None,
    limit: int,
) -> list[ObservationRecord]:
    """Observations. Sort key: `id`, or `log_longppl`, `id`.

    Args:
        series_id: of this series only.
        grid_id: only those that cells of this grid asked for.
        scale: of this scale only.
        order: what to sort by, ascending.
        after: the sort key of the last row seen.
        limit: rows at most.
    """
    columns = (Observation.id,) if order == "id" else (Observation.y, Observation.id)
    statement = select(Observation).order_by(*columns).limit(limit)
    if after is not None:
        statement = statement.where(tuple_(*columns) > after)
    if series_id is not None:
        statement = statement.where(Observation.series_id == series_id)
    if scale is not None:
        statement = statement.where(Observation.scale == scale)
    if grid_id is not None:
        asked = (
            select(CellEvaluation.cell_id)
            .join(Cell, Cell.id == CellEvaluation.cell_id)
            .join(GridEvaluation, claim_of_cell())
            .where(
                Cell.grid_id == grid_id,
                GridEvaluation.closed_as.is_(None),
                CellEvaluation.evaluation_key == Observation.evaluation_key,
                CellEvaluation.series_id == Observation.series_id,
            )
        )
        statement = statement.where(asked.exists())
    return [_observation(row) for row in session.scalars(statement)]


def series_labels(session: Session, *, series_id: str | None = None) -> dict[str, str]:
    """Ids and labels of all series, oldest first, or of the one of that id."""
    statement = select(Series.id, Series.label).order_by(Series.created_at, Series.id)
    if series_id is not None:
        statement = statement.where(Series.id == series_id)
    return {row.id: row.label for row in session.execute(statement)}


def list_series(session: Session) -> list[SeriesRecord]:
    """All series, oldest first."""
    rows = select(func.count()).where(Observation.series_id == Series.id).scalar_subquery()
    latest = (
        select(Fit.id)
        .where(Fit.series_id == Series.id, Fit.state == "SUCCEEDED", Fit.holdout.is_(None))
        .order_by(Fit.created_at.desc(), Fit.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    statement = select(Series, rows, latest).order_by(Series.created_at, Series.id)
    return [
        SeriesRecord(
            id=row.id,
            label=row.label,
            family=row.family,
            protocol=row.protocol,
            rule=row.rule,
            evaluator_id=row.evaluator_id,
            metric=row.metric,
            created_at=row.created_at,
            observations=observations,
            latest_fit_id=fit_id,
        )
        for row, observations, fit_id in session.execute(statement)
    ]


def distinct_points(session: Session, series_id: str) -> int:
    """How many different (N, D_s, D_l) the observations of a series have: what decides whether a law can be fitted.

    Observations without D_s do not count: the law has a term of it.
    """
    known = and_(Observation.series_id == series_id, Observation.short_tokens.is_not(None))
    points = tuple_(Observation.n_params, Observation.short_tokens, Observation.long_tokens)
    return session.scalars(select(func.count(points.distinct())).where(known)).one()


def _grid(row: Grid, state: str) -> GridRecord:
    return GridRecord(
        id=row.id,
        name=row.name,
        protocol=row.protocol,
        state=state,
        paused_at=row.paused_at if state in OPEN_GRID_STATES else None,
        created_at=row.created_at,
        holdout=row.holdout,
        tokens_train=row.tokens_train,
        tokens_independent=row.tokens_independent,
        flops=row.flops,
        gpu_hours=row.gpu_hours,
    )


def _observation(row: Observation) -> ObservationRecord:
    return ObservationRecord(
        id=row.id,
        series_id=row.series_id,
        evaluation_id=row.evaluation_key,
        scale=row.scale,
        n_params=row.n_params,
        short_tokens=row.short_tokens,
        long_tokens=row.long_tokens,
        short_seed=row.short_seed,
        long_seed=row.long_seed,
        cluster=row.cluster,
        log_longppl=row.y,
        log_longppl_se=row.y_se,
        source=row.source,
        created_at=row.created_at,
    )
