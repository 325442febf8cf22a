"""What becomes READY, what is claimed, by whom, and where a run starts."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from database.attempts import Failure, RetryPolicy, fail_attempt, finish_segment, record_checkpoint
from database.engine import create_engine
from database.models import Attempt, Evaluation, Event, Segment
from database.specs import evaluator_from_json, rule_from_json, segment_from_json, to_json
from database.work import ClaimedSegment, Gathering, claim_segment, fail_orphans, promote
from tests.database.work_rows import (
    CORPUS,
    checkpoint_of,
    next_evaluation,
    next_segment,
    run_all,
    scheduler_row,
    segment_row,
    submitted,
    train,
)
from tests.orchestrator.tiny_grid import submit_tiny, tiny_document
from workers.spec import canonical_json


def _states(engine: Engine, table: type[Segment] | type[Evaluation]) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(table.state).order_by(table.id)))


def test_work_becomes_ready_link_by_link(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    assert _states(engine, Segment) == ["PENDING"] * 3
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    assert trunk.run.segment.kind == "short_trunk"
    assert trunk.run.start is None
    assert trunk.run.save_steps == (24,)
    assert _states(engine, Segment) == ["RUNNING", "PENDING", "PENDING"]
    assert next_segment(engine, scheduler) is None
    train(engine, trunk)
    assert _states(engine, Segment) == ["SUCCEEDED", "READY", "PENDING"]
    decay = next_segment(engine, scheduler)
    assert decay is not None
    assert decay.run.start is not None
    assert (decay.run.start.ref.segment, decay.run.start.ref.step) == (trunk.key, 24)
    train(engine, decay)
    long = next_segment(engine, scheduler)
    assert long is not None
    assert long.run.save_steps == (8, 16)
    assert _states(engine, Evaluation) == ["PENDING", "PENDING"]
    with Session(engine) as session, session.begin():
        record_checkpoint(session, long.token, checkpoint_of(long, 8))
    assert _states(engine, Evaluation) == ["READY", "PENDING"]  # measured while the segment trains on
    evaluation = next_evaluation(engine, scheduler)
    assert evaluation is not None
    assert [source.ref.step for source in evaluation.run.sources] == [8]
    assert evaluation.run.rope_base == 100_000
    assert evaluation.run.snapshot.segment == long.key


def test_the_longest_chain_is_trained_first(engine: Engine) -> None:
    submitted(engine, widths=(16, 64), short_steps=(27, 180))
    segments, evaluations = run_all(engine, scheduler_row(engine))
    order = [(claim.scale, claim.run.segment.kind, claim.run.segment.horizon_steps) for claim in segments]
    assert order[0] == ("w64", "short_trunk", None)
    decays = [(scale, horizon_steps) for scale, kind, horizon_steps in order if kind == "short_decay"]
    assert decays == [("w64", 20), ("w64", 3), ("w16", 20), ("w16", 3)]
    assert len(segments) == 10
    assert len(evaluations) == 8


def test_claims_are_exclusive_under_two_schedulers(engine: Engine, database_url: str) -> None:
    """B82: 100 ready segments, two schedulers that claim at the same time: 100 attempts, each the first."""
    submitted(engine, widths=tuple(range(16, 416, 4)))
    with Session(engine) as session, session.begin():
        promote(session)
        assert session.scalar(select(func.count()).where(Segment.state == "READY")) == 100
    schedulers = scheduler_row(engine), scheduler_row(engine)
    start = threading.Barrier(2)
    claimed: dict[uuid.UUID, list[str]] = {scheduler: [] for scheduler in schedulers}

    def claim_all(scheduler: uuid.UUID) -> None:
        own = create_engine(database_url)
        start.wait()
        while True:
            with Session(own) as session, session.begin():
                claim = claim_segment(session, scheduler_id=scheduler, worker="worker-1", lease_s=60.0)
                assert not isinstance(claim, Gathering)
            if claim is None:
                break
            claimed[scheduler].append(claim.key)
        own.dispose()

    threads = [threading.Thread(target=claim_all, args=(scheduler,)) for scheduler in schedulers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = claimed.values()
    assert len(first) + len(second) == 100
    assert len({*first, *second}) == 100
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Attempt)) == 100
        assert session.scalar(select(func.max(Attempt.number))) == 1


def test_run_starts_at_the_nearest_checkpoint_and_trains_what_is_missing(engine: Engine) -> None:
    submitted(engine, short_steps=(27, 180))
    scheduler = scheduler_row(engine)
    first = next_segment(engine, scheduler)
    assert first is not None
    assert first.run.save_steps == (24, 160)
    with Session(engine) as session, session.begin():
        record_checkpoint(session, first.token, checkpoint_of(first, 24))
        record_checkpoint(session, first.token, checkpoint_of(first, 100, scheduled=False))
        failure = Failure(kind="infrastructure", reason="killed", lost=True)
        fail_attempt(session, first.token, failure, policy=RetryPolicy(backoff_s=0.0))
    second = next_segment(engine, scheduler)
    assert second is not None
    assert second.key == first.key
    assert second.run.start is not None
    assert second.run.start.ref.step == 100
    assert second.run.save_steps == (160,)


def test_run_ends_before_a_checkpoint_that_exists(engine: Engine) -> None:
    """A grid that asks for steps between known ones trains them alone, each stretch from the nearest checkpoint."""
    submitted(engine, long_steps=(8, 16))
    scheduler = scheduler_row(engine)
    run_all(engine, scheduler)
    grid = submitted(engine, name="denser", long_steps=(4, 8, 12, 16, 20))
    assert grid.plan.tokens_train == (4 + 4 + 4) * 64
    segments, evaluations = run_all(engine, scheduler)
    assert [(c.run.start and c.run.start.ref.step, c.run.save_steps) for c in segments] == [
        (3, (4,)),  # from its parent, the decay that ends at step 3
        (8, (12,)),
        (16, (20,)),
    ]
    assert {claim.key for claim in segments} == {segments[0].key}
    assert len(evaluations) == 3
    assert segment_row(engine, segments[0].key).generation == 2


def test_save_that_is_added_to_a_running_segment_is_trained_by_its_next_attempt(engine: Engine) -> None:
    submitted(engine, long_steps=(8,))
    scheduler = scheduler_row(engine)
    for _ in range(2):
        claim = next_segment(engine, scheduler)
        assert claim is not None
        train(engine, claim)
    long = next_segment(engine, scheduler)
    assert long is not None
    submitted(engine, name="longer", long_steps=(8, 16))
    train(engine, long)
    row = segment_row(engine, long.key)
    assert (row.generation, row.state, row.target_step) == (1, "READY", 16)
    again = next_segment(engine, scheduler)
    assert again is not None
    assert (again.key, again.run.save_steps) == (long.key, (16,))


def test_failed_parent_fails_all_that_waits_for_it(engine: Engine) -> None:
    submitted(engine)
    trunk = next_segment(engine, scheduler_row(engine))
    assert trunk is not None
    with Session(engine) as session, session.begin():
        failure = Failure(kind="user", reason="loss is nan", hopeless=True)
        fail_attempt(session, trunk.token, failure, policy=RetryPolicy())
    assert _states(engine, Segment) == ["FAILED"] * 3
    assert _states(engine, Evaluation) == ["FAILED"] * 2
    with Session(engine) as session:
        reasons = list(session.scalars(select(Segment.reason).order_by(Segment.id)))
        reasons += session.scalars(select(Evaluation.reason))
        assert fail_orphans(session) == 0
    assert reasons == ["loss is nan"] + ["parent failed: loss is nan"] * 4


def test_branch_of_a_trunk_that_failed_later_is_still_trained(engine: Engine) -> None:
    """Checkpoints belong to the identity: what was reached before a failure is not lost."""
    submitted(engine, short_steps=(27, 180))
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24))
        failure = Failure(kind="user", reason="loss is nan", hopeless=True)
        fail_attempt(session, trunk.token, failure, policy=RetryPolicy())
    segments, evaluations = run_all(engine, scheduler)
    assert [claim.run.segment.kind for claim in segments] == ["short_decay", "long_constant"]
    assert len(evaluations) == 2
    assert sorted(_states(engine, Segment)) == ["FAILED"] * 3 + ["SUCCEEDED"] * 2
    assert sorted(_states(engine, Evaluation)) == ["FAILED"] * 2 + ["SUCCEEDED"] * 2


def test_failed_work_is_opened_again_by_a_new_claim(engine: Engine) -> None:
    """A closed row stays as it is; the next generation resumes from what exists."""
    first = submitted(engine)
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    with Session(engine) as session, session.begin():
        failure = Failure(kind="user", reason="loss is nan", hopeless=True)
        fail_attempt(session, trunk.token, failure, policy=RetryPolicy())
    second = submitted(engine, name="again")
    assert [cell.status for cell in second.plan.cells] == [cell.status for cell in first.plan.cells]
    run_all(engine, scheduler)
    with Session(engine) as session:
        rows = session.execute(select(Segment.generation, Segment.state).order_by(Segment.generation)).all()
        measured = session.execute(select(Evaluation.generation, Evaluation.state).order_by(Evaluation.generation))
        assert rows == [(1, "FAILED")] * 3 + [(2, "SUCCEEDED")] * 3
        assert measured.all() == [(1, "FAILED")] * 2 + [(2, "SUCCEEDED")] * 2


def test_first_evaluation_of_an_evaluator_runs_alone(engine: Engine) -> None:
    """It computes the key tokens that all others read; two at once would compute them twice."""
    submitted(engine)
    scheduler = scheduler_row(engine)
    while (claim := next_segment(engine, scheduler)) is not None:
        train(engine, claim)
    first = next_evaluation(engine, scheduler)
    assert first is not None
    assert next_evaluation(engine, scheduler) is None
    with Session(engine) as session, session.begin():
        failure = Failure(kind="infrastructure", reason="killed", lost=True)
        fail_attempt(session, first.token, failure, policy=RetryPolicy())
    other = next_evaluation(engine, scheduler)
    assert other is not None
    assert other.key != first.key  # the failed one backs off


def test_segment_without_missing_saves_is_closed_instead_of_claimed(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24))
        session.execute(update(Segment).where(Segment.key == trunk.key).values(state="READY"))
        session.execute(update(Attempt).values(state="LOST", ended_at=func.now()))
    decay = next_segment(engine, scheduler)
    assert decay is not None
    assert decay.run.segment.kind == "short_decay"
    assert segment_row(engine, trunk.key).state == "SUCCEEDED"


def test_finished_attempt_cannot_be_finished_again(engine: Engine) -> None:
    submitted(engine)
    trunk = next_segment(engine, scheduler_row(engine))
    assert trunk is not None
    train(engine, trunk)
    with Session(engine) as session, session.begin():
        assert not finish_segment(session, trunk.token)
        succeeded = select(func.count()).where(Event.kind == "segment_succeeded")
        assert session.scalar(succeeded) == 1


def test_specifications_survive_the_database(engine: Engine) -> None:
    grid = submitted(engine).plan
    with Session(engine) as session:
        rows = session.scalars(select(Segment)).all()
        assert {segment_from_json(row.spec).id for row in rows} == {row.key for row in rows}
    for planned in grid.segments:
        assert segment_from_json(to_json(planned.segment)) == planned.segment
    assert evaluator_from_json(to_json(grid.evaluator)) == grid.evaluator
    rule = grid.evaluations[0].snapshot.rule
    assert rule_from_json(to_json(rule)) == rule
    assert canonical_json(to_json(grid.evaluator)) == canonical_json(grid.evaluator)


@pytest.mark.parametrize("steps", [(8,), (8, 16, 24)])
def test_grid_is_stored_with_its_claims(engine: Engine, steps: tuple[int, ...]) -> None:
    grid = submitted(engine, long_steps=steps)
    assert len(grid.plan.cells) == len(steps)
    assert len(_states(engine, Evaluation)) == len(steps)


def _shared_by(processes: int, document: dict[str, Any]) -> dict[str, Any]:
    """The document with batches of eight sequences, of which every process takes as many."""
    for stage in ("short", "long"):
        document["recipe"][stage] |= {"seq_len": 8, "batch_sequences": 8}
    return document | {"execution": {"processes": processes}}


def test_segment_for_several_processes_waits_for_as_many_free_workers(engine: Engine) -> None:
    document = tiny_document(CORPUS, widths=(16,), short_steps=(27,), long_steps=(8,))
    submit_tiny(engine, _shared_by(2, document))
    scheduler = scheduler_row(engine)
    with Session(engine) as session, session.begin():
        promote(session)
        options = {"free_workers": 1, "alive_workers": 2}
        claim = claim_segment(session, scheduler_id=scheduler, worker="worker-1", lease_s=60.0, **options)
        assert claim == Gathering(processes=2)
        options = {"free_workers": 2, "alive_workers": 2}
        claim = claim_segment(session, scheduler_id=scheduler, worker="worker-1", lease_s=60.0, **options)
        assert isinstance(claim, ClaimedSegment)
        assert claim.run.execution.processes == 2


def test_segment_for_more_processes_than_workers_says_so_and_lets_others_pass(engine: Engine) -> None:
    document = tiny_document(CORPUS, widths=(64,), short_steps=(180,), long_steps=(8,))
    submit_tiny(engine, _shared_by(8, document))
    submitted(engine, name="small")
    claim = next_segment(engine, scheduler_row(engine))
    assert claim is not None
    assert claim.scale == "w16"
    with Session(engine) as session:
        row = session.scalars(select(Segment).where(Segment.scale == "w64", Segment.kind == "short_trunk")).one()
        assert row.state == "READY"
        assert row.not_before is not None
        assert row.reason is not None
        assert "asks for 8 processes and the scheduler has 1 live workers" in row.reason
