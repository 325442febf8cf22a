"""Series beside the fitted numbers: how training went, and what probes found."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from database.models import Evaluation, GridEvaluation, GridSegment, Metric, Segment, TrainingPoint
from database.progress import newest
from workers import results

#: Points kept of one segment. When more have come every other one goes, so that newer ones are denser than old ones.
MAX_POINTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeries:
    """How one segment's training went, by rising step; `tokens_per_step` turns steps into tokens of the segment."""

    segment: str
    scale: str
    kind: str
    tokens_per_step: int
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


def training_series(session: Session, grid_id: uuid.UUID) -> tuple[TrainingSeries, ...]:
    """How training of a grid's segments went, parents first where they were planned first; shared ones included."""
    segments = (
        select(Segment.key, Segment.scale, Segment.kind, Segment.tokens_per_step)
        .join(GridSegment, GridSegment.segment_key == Segment.key)
        .where(GridSegment.grid_id == grid_id, newest(Segment))
        .subquery()
    )
    points: dict[str, list[results.HealthPoint]] = defaultdict(list)
    statement = select(TrainingPoint).join(segments, segments.c.key == TrainingPoint.segment_key)
    for row in session.scalars(statement.order_by(TrainingPoint.segment_key, TrainingPoint.step)):
        points[row.segment_key].append(
            results.HealthPoint(
                step=row.step,
                loss=row.loss,
                gradient_norm=row.gradient_norm,
                learning_rate=row.learning_rate,
                tokens_per_s=row.tokens_per_s,
                mfu=row.mfu,
            )
        )
    order = (segments.c.scale, segments.c.kind.desc(), segments.c.key)
    return tuple(
        TrainingSeries(segment=key, scale=scale, kind=kind, tokens_per_step=tokens, points=tuple(points[key]))
        for key, scale, kind, tokens in session.execute(select(segments).order_by(*order))
        if key in points
    )


def list_metrics(session: Session, grid_id: uuid.UUID, *, after: int | None, limit: int) -> list[MetricRecord]:
    """Numbers of the probes of a grid, oldest first. Sort key: `id`."""
    statement = (
        select(Metric, Evaluation)
        .join(Evaluation, Evaluation.id == Metric.evaluation_id)
        .where(Evaluation.key.in_(select(GridEvaluation.evaluation_key).where(GridEvaluation.grid_id == grid_id)))
        .order_by(Metric.id)
        .limit(limit)
    )
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
