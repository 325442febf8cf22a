"""Grids that are told something, and what can be seen of it."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable

from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from database.attempts import Failure, RetryPolicy, fail_attempt, record_checkpoint, to_stop
from database.models import Checkpoint, Evaluation, Segment, SegmentSave
from database.progress import cell_counts, grid_states
from database.reading_cells import list_cells
from database.verbs import Obeyed, Verb, obey
from database.work import ClaimedSegment
from tests.database.work_rows import checkpoint_of, next_segment, train

HOPELESS = Failure(kind="user", reason="loss is nan", hopeless=True)


def asked(engine: Engine, grid_id: uuid.UUID, verb: Verb) -> Obeyed:
    with Session(engine) as session, session.begin():
        obeyed = obey(session, grid_id, verb)
        assert obeyed is not None
        return obeyed


def state_of(engine: Engine, grid_id: uuid.UUID) -> str:
    with Session(engine) as session:
        return grid_states(session, [grid_id])[grid_id]


def cells_of(engine: Engine, grid_id: uuid.UUID) -> dict[str, int]:
    """Cells by state, as the detail, the list of cells and SQL have them; all agree, and none is lost or doubled."""
    with Session(engine) as session:
        counts = {state: count for state, count in cell_counts(session, grid_id).items() if count}
        assert counts == Counter(cell.state for cell in list_cells(session, grid_id, after=None, limit=100))
        view = text("SELECT state, count(*) FROM research.cells WHERE grid_id = :id GROUP BY state")
        assert counts == dict(session.execute(view, {"id": grid_id}).all())
    return counts


def missing_steps(engine: Engine, key: str) -> list[int]:
    with Session(engine) as session:
        there = select(Checkpoint.step).where(Checkpoint.segment_key == key)
        rows = select(SegmentSave.step).where(SegmentSave.segment_key == key, SegmentSave.step.not_in(there))
        return list(session.scalars(rows.order_by(SegmentSave.step)))


def states(engine: Engine, table: type[Segment] | type[Evaluation]) -> Counter[str]:
    with Session(engine) as session:
        return Counter(session.scalars(select(table.state)))


def long_stage(engine: Engine, scheduler: uuid.UUID) -> ClaimedSegment:
    """The long stage, claimed; what it begins with is trained."""
    while (claim := next_segment(engine, scheduler)) is not None:
        if claim.run.segment.kind == "long_constant":
            return claim
        train(engine, claim)
    raise AssertionError("no long stage")


def record(engine: Engine, claim: ClaimedSegment, step: int) -> bool:
    with Session(engine) as session, session.begin():
        return record_checkpoint(session, claim.token, checkpoint_of(claim, step))


def told_to_stop(engine: Engine, scheduler: uuid.UUID) -> tuple[uuid.UUID, ...]:
    with Session(engine) as session:
        return to_stop(session, scheduler_id=scheduler)


def fail_trunk(engine: Engine, scheduler: uuid.UUID) -> ClaimedSegment:
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    with Session(engine) as session, session.begin():
        fail_attempt(session, trunk.token, HOPELESS, policy=RetryPolicy())
    return trunk


def together(*acts: Callable[[], object]) -> list[object]:
    """Does all of it at once; what each returned or raised."""
    start = threading.Barrier(len(acts))
    results: list[object] = [None] * len(acts)

    def do(number: int) -> None:
        start.wait()
        try:
            results[number] = acts[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=do, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
