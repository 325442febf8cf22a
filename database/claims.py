"""Who asks for work. Several grids may claim one segment or evaluation; what runs is what some grid still asks for.

A claim counts until its grid is cancelled. While a grid is paused its claims hold nothing up that others ask for, and
set nothing going.

Conditions are built once, since all that is nested in them takes milliseconds to put together.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from database.models import (
    OPEN_STATES,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    Grid,
    GridEvaluation,
    GridSegment,
    Segment,
    SegmentSave,
    SegmentSource,
)

#: The number of the advisory lock that verbs hold alone and whoever begins work shares: "claims" as an integer.
_LOCK = int.from_bytes(b"claims", "big")


def hold_claims(session: Session) -> None:
    """Nothing begins until the transaction ends; whoever is about to begin something is waited for."""
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def may_begin(session: Session) -> bool:
    """Whether nobody holds the claims; if so, nobody will until the transaction ends. Never waits."""
    return bool(session.scalar(select(func.pg_try_advisory_xact_lock_shared(_LOCK))))


@functools.cache
def evaluation_held() -> ColumnElement[bool]:
    """Whether all grids that ask for an evaluation are paused; for statements over `Evaluation`."""
    return and_(_some_grid_is_paused(), ~_evaluation_claimed(Evaluation.key.expression))


@functools.cache
def segment_held() -> ColumnElement[bool]:
    """Whether a segment lacks only what paused grids ask for; for statements over `Segment`."""
    asked = exists().where(SegmentSave.segment_key == Segment.key, missing_save(), _asked_for(by_an_unpaused_grid=True))
    return and_(_some_grid_is_paused(), lacks_a_save(), ~asked)


@functools.cache
def save_held() -> ColumnElement[bool]:
    """Whether only paused grids ask for a scheduled checkpoint; for statements over `SegmentSave`."""
    return and_(_some_grid_is_paused(), ~_asked_for(by_an_unpaused_grid=True))


def missing_save() -> ColumnElement[bool]:
    """Whether a scheduled checkpoint is still to be trained; for statements over `SegmentSave`."""
    return ~exists().where(Checkpoint.segment_key == SegmentSave.segment_key, Checkpoint.step == SegmentSave.step)


def lacks_a_save() -> ColumnElement[bool]:
    """Whether a scheduled checkpoint of a segment is still to be trained; for statements over `Segment`."""
    return exists().where(SegmentSave.segment_key == Segment.key, missing_save())


def open_segments(
    grid_id: uuid.UUID, states: Sequence[str] = OPEN_STATES, *, closed_as: str | None = None
) -> Select[int]:
    """Ids of the open segments that a grid asks for, or on which its claim was `closed_as` something."""
    claim = aliased(GridSegment)
    return (
        select(Segment.id)
        .join(claim, claim.segment_key == Segment.key)
        .where(claim.grid_id == grid_id, claim.closed_as.is_not_distinct_from(closed_as), Segment.state.in_(states))
    )


def open_evaluations(
    grid_id: uuid.UUID, states: Sequence[str] = OPEN_STATES, *, closed_as: str | None = None
) -> Select[int]:
    """The same of evaluations."""
    claim = aliased(GridEvaluation)
    return (
        select(Evaluation.id)
        .join(claim, claim.evaluation_key == Evaluation.key)
        .where(claim.grid_id == grid_id, claim.closed_as.is_not_distinct_from(closed_as), Evaluation.state.in_(states))
    )


def drop_unread_saves(session: Session, among: ColumnElement[bool]) -> None:
    """Forgets scheduled checkpoints that are still to be trained and that no open work reads any more.

    Args:
        among: of these rows of `SegmentSave` only.
    """
    unread = delete(SegmentSave).where(among, missing_save(), ~_asked_for())
    session.execute(unread.execution_options(synchronize_session=False))


def _some_grid_is_paused() -> ColumnElement[bool]:
    """Does not depend on the row: where nothing is paused the conditions beside it cost nothing."""
    grid = aliased(Grid)
    return exists().where(grid.paused_at.is_not(None))


def _asked_for(*, by_an_unpaused_grid: bool = False) -> ColumnElement[bool]:
    evaluation, source = aliased(Evaluation), aliased(EvaluationSource)
    child, other_start = aliased(Segment), aliased(SegmentSource)
    reads: list[ColumnElement[bool]] = [
        source.segment_key == SegmentSave.segment_key,
        source.step == SegmentSave.step,
        evaluation.key == source.evaluation_key,
        evaluation.state.in_(OPEN_STATES),
    ]
    begins: list[ColumnElement[bool]] = [child.state.in_(OPEN_STATES)]
    if by_an_unpaused_grid:
        reads.append(_evaluation_claimed(evaluation.key.expression))
        begins.append(_segment_claimed(child.key.expression))
    there = [child.parent_key == SegmentSave.segment_key, child.parent_step == SegmentSave.step]
    merged = [
        other_start.source_key == SegmentSave.segment_key,
        other_start.step == SegmentSave.step,
        child.key == other_start.segment_key,
    ]
    return or_(exists().where(*reads), exists().where(*there, *begins), exists().where(*merged, *begins))


def _evaluation_claimed(key: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether a grid that is not paused asks for the evaluation."""
    claim, grid = aliased(GridEvaluation), aliased(Grid)
    return exists().where(
        claim.evaluation_key == key, claim.closed_as.is_(None), grid.id == claim.grid_id, grid.paused_at.is_(None)
    )


def _segment_claimed(key: ColumnElement[str]) -> ColumnElement[bool]:
    claim, grid = aliased(GridSegment), aliased(Grid)
    return exists().where(
        claim.segment_key == key, claim.closed_as.is_(None), grid.id == claim.grid_id, grid.paused_at.is_(None)
    )
