"""Training series stay bounded and evenly dense; probes' numbers come back as they were."""

from __future__ import annotations

import dataclasses
import itertools
import uuid

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from database.attempts import finish_segment, record_checkpoint, record_evaluation
from database.measures import MAX_POINTS, list_metrics, record_points, training_series
from database.models import GridSegment
from tests.database.work_rows import (
    checkpoint_of,
    evaluation_result,
    next_evaluation,
    next_segment,
    run_all,
    scheduler_row,
    submitted,
)
from workers.results import HealthPoint, Metric


def point(step: int, loss: float = 3.0) -> HealthPoint:
    return HealthPoint(step=step, loss=loss, gradient_norm=1.5, learning_rate=0.01, tokens_per_s=1e4)


def test_points_of_a_checkpoint_become_the_segments_series(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    claim = next_segment(engine, scheduler_row(engine))
    assert claim is not None
    points = (point(8), point(16), point(24, loss=2.0))
    checkpoint = dataclasses.replace(checkpoint_of(claim, 24), health=points)
    with Session(engine) as session, session.begin():
        record_checkpoint(session, claim.token, checkpoint)
    with Session(engine) as session:
        (series,) = training_series(session, grid_id)
        assert training_series(session, uuid.uuid4()) == ()
    assert (series.segment, series.scale, series.kind) == (claim.key, "w16", "short_trunk")
    assert series.tokens_per_step == claim.run.segment.stage.tokens_per_step
    assert series.points == points


def test_step_trained_again_keeps_its_first_point(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    with Session(engine) as session, session.begin():
        key = session.scalars(select(GridSegment.segment_key)).first()
        assert key is not None
        record_points(session, key, (point(1), point(2)))
        record_points(session, key, (point(2, loss=9.0), point(3)))
        (series,) = training_series(session, grid_id)
    assert [(p.step, p.loss) for p in series.points] == [(1, 3.0), (2, 3.0), (3, 3.0)]


def test_long_series_thins_out_and_keeps_its_ends(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    with Session(engine) as session, session.begin():
        key = session.scalars(select(GridSegment.segment_key)).first()
        assert key is not None
        for first in range(1, 40 * 64, 64):
            record_points(session, key, [point(step) for step in range(first, first + 64)])
        (series,) = training_series(session, grid_id)
    steps = [p.step for p in series.points]
    assert MAX_POINTS // 2 < len(steps) <= MAX_POINTS
    assert steps[0] == 1
    assert steps[-1] > 40 * 64 - 8
    assert max(later - step for step, later in itertools.pairwise(steps)) <= 16


def test_numbers_of_probes_come_back_with_the_model_they_are_of(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    while (claim := next_segment(engine, scheduler)) is not None:
        with Session(engine) as session, session.begin():
            for step in claim.run.save_steps:
                record_checkpoint(session, claim.token, checkpoint_of(claim, step))
            finish_segment(session, claim.token)
    evaluation = next_evaluation(engine, scheduler)
    assert evaluation is not None
    metrics = (
        Metric(name="passkey_accuracy", value=0.5, count=10, length=128, depth=0.25),
        Metric(name="retrieval_score", value=0.2, count=40, label="0.1"),
    )
    result = dataclasses.replace(evaluation_result(), metrics=metrics)
    with Session(engine) as session, session.begin():
        assert record_evaluation(session, evaluation.token, result)
    with Session(engine) as session:
        records = list_metrics(session, grid_id, after=None, limit=10)
        assert [record.metric for record in records] == list(metrics)
        assert [record.id for record in list_metrics(session, grid_id, after=records[0].id, limit=10)] == [
            records[1].id
        ]
    assert {(record.scale, record.rule, record.evaluation) for record in records} == {("w16", "raw", evaluation.key)}
    run_all(engine, scheduler)
