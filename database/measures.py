"""Series beside the fitted numbers: how training went, and what probes found."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased, defer

from database.models import Attempt, Evaluation, GridEvaluation, GridSegment, Metric, Segment, TrainingPoint
from database.progress import newest
from workers import results

#: Points kept of one segment. When more have come every other one goes, so that newer ones are denser than old ones.
MAX_POINTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePoint:
    """The newest sign of life of an attempt that runs now; its steps are not durable yet."""

    step: int
    loss: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeries:
    """How one segment's training went, by rising step; `tokens_per_step` turns steps into tokens of the segment.

    `tokens_before` are those of its ancestors up to where it begins. `id` is that of the segment's first generation:
    ids rise in the order of plans, parents before children, and never change.
    """

    id: int
    segment: str
    scale: str
    kind: str
    state: str
    parent: str | None
    parent_step: int | None
    tokens_per_step: int
    tokens_before: int
    live: LivePoint | None
    points: tuple[results.HealthPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """A probe's number and the model that it is of."""

    id: int
    evaluation: str
    segment: str
    step: int
    rule: str
    follow_up: str | None
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    metric: results.Metric


def record_points(session: Session, segment_key: str, points: Sequence[results.HealthPoint]) -> None:
    """Adds points of a segment's training; a step that was trained again after a fault keeps its first one."""
    if not points:
        return
    rows = [{"segment_key": segment_key, **asdict(point)} for point in points]
    session.execute(insert(TrainingPoint).on_conflict_do_nothing(), rows)
    mine = TrainingPoint.segment_key == segment_key
    while (session.scalar(select(func.count()).where(mine)) or 0) > MAX_POINTS:
        numbered = select(TrainingPoint.step, func.row_number().over(order_by=TrainingPoint.step).label("number"))
        ordered = numbered.where(mine).subquery()
        session.execute(
            delete(TrainingPoint).where(
                mine, TrainingPoint.step.in_(select(ordered.c.step).where(ordered.c.number % 2 == 0))
            )
        )


def record_metrics(session: Session, evaluation_id: int, metrics: Sequence[results.Metric]) -> None:
    """Adds the numbers of an evaluation's probes."""
    session.add_all(Metric(evaluation_id=evaluation_id, **asdict(metric)) for metric in metrics)


def training_series(
    session: Session,
    grid_id: uuid.UUID,
    *,
    scale: str | None = None,
    after: int | None = None,
    limit: int | None = None,
    max_points: int = MAX_POINTS,
) -> tuple[TrainingSeries, ...]:
    """How training of a grid's segments went, shared ones included; those that have begun. Sort key: `id`.

    Args:
        scale: of this scale only.
        after: the sort key of the last segment seen.
        limit: segments at most.
        max_points: points of a segment at most, evenly spread, its first and its last among them; at least two.
    """
    first = aliased(Segment)
    has_points = select(TrainingPoint.step).where(TrainingPoint.segment_key == Segment.key).exists()
    statement = (
        select(Segment, first.id, Attempt)
        .join(GridSegment, GridSegment.segment_key == Segment.key)
        .join(first, and_(first.key == Segment.key, first.generation == 1))
        .outerjoin(Attempt, and_(Attempt.segment_id == Segment.id, Attempt.state == "RUNNING"))
        .where(GridSegment.grid_id == grid_id, newest(Segment), or_(Attempt.id.is_not(None), has_points))
        .options(defer(Segment.spec), defer(Segment.execution))
        .order_by(first.id)
        .limit(limit)
    )
    if scale is not None:
        statement = statement.where(Segment.scale == scale)
    if after is not None:
        statement = statement.where(first.id > after)
    rows = session.execute(statement).all()
    keys = [segment.key for segment, _, _ in rows]
    points, before = _points(session, keys, max_points), _tokens_before(session, keys)
    return tuple(
        TrainingSeries(
            id=first_id,
            segment=segment.key,
            scale=segment.scale,
            kind=segment.kind,
            state=segment.state,
            parent=segment.parent_key,
            parent_step=segment.parent_step,
            tokens_per_step=segment.tokens_per_step,
            tokens_before=before.get(segment.key, 0),
            live=None if attempt is None else _live(attempt),
            points=tuple(points[segment.key]),
        )
        for segment, first_id, attempt in rows
    )


def _points(session: Session, keys: Sequence[str], most: int) -> dict[str, list[results.HealthPoint]]:
    """Points of each segment by step. Of c > m, number n (from 0) stays where n (m - 1) / (c - 1) passes an integer."""
    segment, step = TrainingPoint.segment_key, TrainingPoint.step
    names = [field.name for field in fields(results.HealthPoint)]
    columns = [segment, *(getattr(TrainingPoint, name) for name in names)]
    statement = select(*columns).where(segment.in_(keys)).order_by(segment, step)
    if most < MAX_POINTS:
        number = func.row_number().over(partition_by=segment, order_by=step) - 1
        count = func.count().over(partition_by=segment)
        numbered = statement.order_by(None).add_columns(number.label("number"), count.label("count")).subquery()
        kept = numbered.c.number * (most - 1) % func.greatest(numbered.c.count - 1, 1) < most - 1
        statement = (
            select(*(numbered.c[column.name] for column in columns))
            .where(or_(numbered.c.count <= most, kept))
            .order_by(numbered.c.segment_key, numbered.c.step)
        )
    found: dict[str, list[results.HealthPoint]] = defaultdict(list)
    for key, *values in session.execute(statement):
        found[key].append(results.HealthPoint(**dict(zip(names, values, strict=True))))
    return found


def _tokens_before(session: Session, keys: Sequence[str]) -> dict[str, int]:
    """Tokens that the ancestors of each segment trained up to where the next one begins; none for a root."""
    link = (Segment.parent_key, Segment.parent_step)
    known = Segment.generation == 1
    way = select(Segment.key, *link).where(Segment.key.in_(keys), known).cte(recursive=True)
    way = way.union_all(select(way.c.key, *link).join(Segment, and_(Segment.key == way.c.parent_key, known)))
    tokens = func.sum(way.c.parent_step * Segment.tokens_per_step)
    statement = select(way.c.key, tokens).join(Segment, and_(Segment.key == way.c.parent_key, known))
    return {key: int(total) for key, total in session.execute(statement.group_by(way.c.key))}


def _live(attempt: Attempt) -> LivePoint | None:
    if attempt.progress_step is None:
        return None
    return LivePoint(step=attempt.progress_step, loss=attempt.loss, tokens_per_s=attempt.tokens_per_s)


def list_metrics(
    session: Session,
    grid_id: uuid.UUID,
    *,
    name: str | None = None,
    scale: str | None = None,
    after: int | None,
    limit: int,
) -> list[MetricRecord]:
    """Numbers of the probes of a grid, oldest first. Sort key: `id`.

    Args:
        name: of this metric only.
        scale: of this scale only.
        after: the sort key of the last row seen.
        limit: rows at most.
    """
    statement = (
        select(Metric, Evaluation)
        .join(Evaluation, Evaluation.id == Metric.evaluation_id)
        .where(Evaluation.key.in_(select(GridEvaluation.evaluation_key).where(GridEvaluation.grid_id == grid_id)))
        .options(defer(Evaluation.documents))
        .order_by(Metric.id)
        .limit(limit)
    )
    if name is not None:
        statement = statement.where(Metric.name == name)
    if scale is not None:
        statement = statement.where(Evaluation.scale == scale)
    if after is not None:
        statement = statement.where(Metric.id > after)
    return [
        MetricRecord(
            id=row.id,
            evaluation=of.key,
            segment=of.segment_key,
            step=of.step,
            rule=of.rule["name"],
            follow_up=of.follow_up,
            scale=of.scale,
            n_params=of.n_params,
            short_tokens=of.short_tokens,
            long_tokens=of.long_tokens,
            short_seed=of.short_seed,
            long_seed=of.long_seed,
            metric=results.Metric(
                name=row.name, value=row.value, count=row.count, length=row.length, depth=row.depth, label=row.label
            ),
        )
        for row, of in session.execute(statement)
    ]
