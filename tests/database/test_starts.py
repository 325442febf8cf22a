"""What segments begin with, and how they are run: a rule's checkpoints, a folder, an execution that retries keep."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from database.attempts import Failure, RetryPolicy, fail_attempt, record_checkpoint
from database.models import Cell, Evaluation, Event, Observation, Segment
from database.work import ClaimedSegment
from tests.database.work_rows import (
    CORPUS,
    checkpoint_of,
    next_evaluation,
    next_segment,
    run_all,
    scheduler_row,
    segment_row,
    train,
)
from tests.orchestrator.tiny_grid import LONG_STEP_TOKENS, submit_tiny, tiny_document
from workers.spec import Execution, FolderModel, Yarn

MODEL = {"digest": "d" * 64, "n_params": 1_000, "embedding_params": 600, "layers": 2, "width": 8, "vocab_size": 300}
MERGED = {"name": "last_m", "m": 3, "spacing": 2 * LONG_STEP_TOKENS}


def document(**changes: Any) -> dict[str, Any]:
    """A model from a folder, trained for 8 steps."""
    made = tiny_document(CORPUS, long_steps=(8,))
    made["scales"] = {"released": {"model": dict(MODEL), "short_tokens_seen": "unknown"}}
    made["recipe"]["long"]["start_rate"] = 0.001
    del made["short_tokens"]
    return made | changes


def follow_up(start: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "longer", "from": start, "tokens": 2 * LONG_STEP_TOKENS}]


def claimed(engine: Engine, scheduler: Any) -> ClaimedSegment:
    claim = next_segment(engine, scheduler)
    assert isinstance(claim, ClaimedSegment)
    return claim


def save(engine: Engine, claim: ClaimedSegment, step: int) -> None:
    with Session(engine) as session, session.begin():
        assert record_checkpoint(session, claim.token, checkpoint_of(claim, step))


def test_a_folder_is_ready_at_once_and_its_run_has_no_start(engine: Engine) -> None:
    submit_tiny(engine, document())
    run = claimed(engine, scheduler_row(engine)).run
    assert run.segment.shape == FolderModel(**MODEL)  # type: ignore[arg-type]
    assert (run.start, run.start_sources, run.save_steps) == (None, (), (8,))


def test_unknown_short_tokens_are_null_from_the_cell_to_the_observation(engine: Engine) -> None:
    submit_tiny(engine, document())
    run_all(engine, scheduler_row(engine))
    with Session(engine) as session:
        for table in (Cell, Evaluation, Observation):
            assert list(session.scalars(select(table.short_tokens))) == [None]


def test_a_merged_start_waits_for_all_its_checkpoints_and_takes_them_along(engine: Engine) -> None:
    submit_tiny(engine, document(follow_ups=follow_up(MERGED)))
    scheduler = scheduler_row(engine)
    long = claimed(engine, scheduler)
    assert long.run.save_steps == (4, 6, 8)
    for step in (4, 6):
        save(engine, long, step)
        assert next_segment(engine, scheduler) is None
    train(engine, long)
    run = claimed(engine, scheduler).run
    assert run.segment.kind == "follow_up"
    assert run.start is None
    assert [(source.ref.segment, source.ref.step) for source in run.start_sources] == [
        (long.key, 4),
        (long.key, 6),
        (long.key, 8),
    ]


def test_a_raw_start_is_the_parents_checkpoint_and_a_resume_its_own(engine: Engine) -> None:
    submit_tiny(engine, document(follow_ups=follow_up({"name": "raw"})))
    scheduler = scheduler_row(engine)
    long = claimed(engine, scheduler)
    train(engine, long)
    begun = claimed(engine, scheduler)
    assert begun.run.start is not None
    assert begun.run.start.ref == begun.run.segment.parent
    save(engine, begun, 1)
    failure = Failure(kind="infrastructure", reason="gone")
    with Session(engine) as session, session.begin():
        assert fail_attempt(session, begun.token, failure, policy=RetryPolicy(backoff_s=0.0))
    resumed = claimed(engine, scheduler)
    assert resumed.run.start is not None
    assert (resumed.run.start.ref.segment, resumed.run.start.ref.step) == (begun.key, 1)


def test_a_merged_start_fails_with_the_segment_that_it_merges(engine: Engine) -> None:
    submit_tiny(engine, document(follow_ups=follow_up(MERGED)))
    long = claimed(engine, scheduler_row(engine))
    save(engine, long, 4)
    failure = Failure(kind="user", reason="diverged", hopeless=True)
    with Session(engine) as session, session.begin():
        assert fail_attempt(session, long.token, failure, policy=RetryPolicy())
    with Session(engine) as session:
        reasons = dict(session.execute(select(Segment.kind, Segment.reason)).all())
        assert set(session.scalars(select(Evaluation.state))) == {"FAILED"}
        assert list(session.scalars(select(Event.kind).where(Event.kind == "segment_failed"))) == ["segment_failed"] * 2
    assert reasons == {"long_constant": "diverged", "follow_up": "parent failed: diverged"}


def test_a_follow_up_is_measured_and_marked_but_makes_no_observation(engine: Engine) -> None:
    submit_tiny(engine, document(follow_ups=follow_up(MERGED)))
    _, evaluations = run_all(engine, scheduler_row(engine))
    assert len(evaluations) == 2
    with Session(engine) as session:
        rows = session.execute(select(Evaluation.follow_up, Evaluation.long_tokens).order_by(Evaluation.id)).all()
        assert [tuple(row) for row in rows] == [(None, 8 * LONG_STEP_TOKENS), ("longer", 8 * LONG_STEP_TOKENS)]
        assert len(session.scalars(select(Observation)).all()) == 1


def test_the_folder_itself_is_measured_without_any_checkpoint(engine: Engine) -> None:
    made = document()
    made["evaluation"]["diagnose_zero"] = True
    submit_tiny(engine, made)
    claim = next_evaluation(engine, scheduler_row(engine))
    assert claim is not None
    assert (claim.run.sources, claim.run.snapshot.step) == ((), 0)
    assert claim.run.shape == FolderModel(**MODEL)  # type: ignore[arg-type]


def test_evaluations_know_the_interpolation_of_their_model(engine: Engine) -> None:
    made = document()
    del made["recipe"]["long"]["rope_base"]
    made["recipe"]["long"]["rope"] = {"method": "yarn", "base": 10_000, "original_length": 16}
    submit_tiny(engine, made)
    _, (evaluation,) = run_all(engine, scheduler_row(engine))
    assert (evaluation.run.rope_base, evaluation.run.yarn) == (10_000, Yarn(factor=4.0, original_positions=16))


def test_a_retry_keeps_the_execution_that_it_was_planned_with(engine: Engine) -> None:
    how = {"recompute_activations": True, "micro_batch_tokens": 64}
    submit_tiny(engine, document(execution=how))
    scheduler = scheduler_row(engine)
    first = claimed(engine, scheduler)
    assert first.run.execution == Execution(recompute_activations=True, micro_batch_tokens=64)
    submit_tiny(engine, document(name="other"))  # wants the same segment, in another way
    with Session(engine) as session, session.begin():
        failure = Failure(kind="infrastructure", reason="gone")
        assert fail_attempt(session, first.token, failure, policy=RetryPolicy(backoff_s=0.0))
    again = claimed(engine, scheduler)
    assert (again.key, again.run.execution) == (first.key, first.run.execution)
    assert segment_row(engine, first.key).generation == 1
