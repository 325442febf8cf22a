"""Which checkpoints go, which stay, and that what went can come back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from database.attempts import Failure, RetryPolicy, fail_attempt, record_checkpoint
from database.models import Checkpoint, Event, Segment
from database.progress import cell_counts
from database.retention import forget_unreadable, give_up_unneeded, unrecorded
from database.verbs import obey
from tests.database.work_rows import (
    CORPUS,
    checkpoint_of,
    next_evaluation,
    next_segment,
    run_all,
    scheduler_row,
    submitted,
    train,
)
from tests.orchestrator.tiny_grid import submit_tiny, tiny_document


def kept(engine: Engine, kind_of: Mapping[str, str]) -> set[tuple[str, int]]:
    with Session(engine) as session:
        rows = session.execute(select(Checkpoint.segment_key, Checkpoint.step)).all()
    return {(kind_of[key], step) for key, step in rows}


def give_up(engine: Engine) -> tuple[str, ...]:
    with Session(engine) as session, session.begin():
        return give_up_unneeded(session)


def test_measured_checkpoints_go_but_branches_and_the_newest_stay(engine: Engine) -> None:
    submitted(engine)
    segments, _ = run_all(engine, scheduler_row(engine))
    kinds = {claim.key: claim.run.segment.kind for claim in segments}
    everything = {("short_trunk", 24), ("short_decay", 3), ("long_constant", 8), ("long_constant", 16)}
    assert kept(engine, kinds) == everything
    (path,) = give_up(engine)
    assert path == checkpoint_of(segments[-1], 8).path
    assert kept(engine, kinds) == everything - {("long_constant", 8)}
    assert give_up(engine) == ()
    with Session(engine) as session:
        event = session.scalars(select(Event).where(Event.kind == "checkpoint_given_up")).one()
    assert event.payload == {"step": 8, "digest": checkpoint_of(segments[-1], 8).digest}


def test_nothing_goes_that_is_still_to_be_measured(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    for _ in range(3):
        claim = next_segment(engine, scheduler)
        assert claim is not None
        with Session(engine) as session, session.begin():
            for step in claim.run.save_steps:
                record_checkpoint(session, claim.token, checkpoint_of(claim, step))
        assert give_up(engine) == ()
    assert next_evaluation(engine, scheduler) is not None  # it runs now, which is not done
    assert give_up(engine) == ()


def test_extended_grid_trains_on_without_what_went(engine: Engine) -> None:
    submitted(engine)
    run_all(engine, scheduler_row(engine))
    give_up(engine)
    submitted(engine, long_steps=(8, 16, 24))
    segments, evaluations = run_all(engine, scheduler_row(engine))
    (again,) = segments
    assert (again.run.start is not None and again.run.start.ref.step, again.run.save_steps) == (16, (24,))
    assert [claim.run.snapshot.step for claim in evaluations] == [24]


def test_another_rule_brings_back_what_it_reads(engine: Engine) -> None:
    submitted(engine)
    run_all(engine, scheduler_row(engine))
    give_up(engine)
    document = tiny_document(CORPUS, name="measured otherwise", widths=(16,), short_steps=(27,), long_steps=(8, 16))
    document["evaluation"]["gain_threshold"] = 1.0
    submit_tiny(engine, document)
    segments, evaluations = run_all(engine, scheduler_row(engine))
    (again,) = segments
    assert (again.run.segment.kind, again.run.save_steps) == ("long_constant", (8,))
    assert again.run.start is not None
    assert again.run.start.ref == again.run.segment.parent
    assert [claim.run.snapshot.step for claim in evaluations] == [8, 16]


def test_what_no_row_names_may_go_while_no_attempt_is_at_the_segment(engine: Engine) -> None:
    submitted(engine)
    claim = next_segment(engine, scheduler_row(engine))
    assert claim is not None
    with Session(engine) as session, session.begin():
        record_checkpoint(session, claim.token, checkpoint_of(claim, 8, scheduled=False))
    with Session(engine) as session, session.begin():
        assert unrecorded(session, claim.key, (8, 16)) == ()
        assert fail_attempt(
            session, claim.token, Failure(kind="infrastructure", reason="conflict"), policy=RetryPolicy()
        )
        assert unrecorded(session, claim.key, (8, 16, 20)) == (16, 20)
        with Session(engine) as other:
            none_can_begin = select(Segment.id).where(Segment.key == claim.key).with_for_update(skip_locked=True)
            assert other.scalar(none_can_begin) is None
    with Session(engine) as session:
        removed = session.scalars(select(Event).where(Event.kind == "unrecorded_checkpoint_removed")).all()
    assert [event.payload for event in removed] == [{"step": 16}, {"step": 20}]


def test_nothing_goes_of_a_segment_that_is_closed(engine: Engine) -> None:
    """Nothing holds it: somebody may be opening it again."""
    submitted(engine)
    segments, _ = run_all(engine, scheduler_row(engine))
    with Session(engine) as session, session.begin():
        assert unrecorded(session, segments[0].key, (1,)) == ()


def test_lost_checkpoint_fails_what_reads_it_and_is_trained_again_on_retry(engine: Engine) -> None:
    grid = submitted(engine)
    scheduler = scheduler_row(engine)
    long = None
    while (claim := next_segment(engine, scheduler)) is not None:
        train(engine, claim)
        long = claim
    first = next_evaluation(engine, scheduler)  # another one waits
    assert long is not None
    assert first is not None
    (source,) = first.run.sources
    failure = Failure(kind="infrastructure", reason="CheckpointMissingError: gone")
    tries = RetryPolicy(infrastructure_retries=1, backoff_s=0.0)

    def failed(token: uuid.UUID) -> bool:
        with Session(engine) as session, session.begin():
            assert fail_attempt(session, token, failure, policy=tries)
        with Session(engine) as session, session.begin():
            return forget_unreadable(session, source.ref, token=token)

    assert not failed(first.token)  # it is tried again
    again = next_evaluation(engine, scheduler)
    assert again is not None
    assert failed(again.token)
    with Session(engine) as session, session.begin():
        assert session.scalar(select(Event.payload).where(Event.kind == "checkpoint_lost")) == {
            "step": source.ref.step,
            "digest": source.digest,
        }
        obey(session, grid.grid_id, "retry-failed")
    segments, evaluations = run_all(engine, scheduler)
    (trained_again,) = segments
    assert (trained_again.key, trained_again.run.save_steps) == (long.key, (source.ref.step,))
    assert first.key in {claim.key for claim in evaluations}
    with Session(engine) as session:
        assert cell_counts(session, grid.grid_id)["MEASURED"] == 2
