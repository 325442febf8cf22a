"""Grids in the database without training: submitted for real, then driven row by row."""

from __future__ import annotations

import uuid

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from database.attempts import finish_segment, record_checkpoint, record_evaluation
from database.leading import heartbeat
from database.models import Segment
from database.work import ClaimedEvaluation, ClaimedSegment, Gathering, claim_evaluation, claim_segment, promote
from orchestrator.submit import SubmittedGrid
from tests.orchestrator.tiny_grid import submit_tiny, tiny_document
from workers.results import Checkpoint, DocumentScore, Evaluation
from workers.spec import CheckpointRef, content_hash

CORPUS = "c" * 32
LEASE_S = 60.0


def submitted(
    engine: Engine,
    *,
    name: str = "grid",
    widths: tuple[int, ...] = (16,),
    short_steps: tuple[int, ...] = (27,),
    long_steps: tuple[int, ...] = (8, 16),
) -> SubmittedGrid:
    """A small grid; by default 3 segments (trunk to 24, decay to 3, long to 16) and 2 evaluations."""
    document = tiny_document(CORPUS, name=name, widths=widths, short_steps=short_steps, long_steps=long_steps)
    return submit_tiny(engine, document)


def scheduler_row(engine: Engine, *, host: str = "here", pid: int = 1) -> uuid.UUID:
    """The id of a registered scheduler."""
    scheduler_id = uuid.uuid4()
    with Session(engine) as session, session.begin():
        heartbeat(session, scheduler_id=scheduler_id, host=host, pid=pid, workers=1, leading=False)
    return scheduler_id


def next_segment(engine: Engine, scheduler_id: uuid.UUID, *, lease_s: float = LEASE_S) -> ClaimedSegment | None:
    with Session(engine) as session, session.begin():
        promote(session)
        claim = claim_segment(session, scheduler_id=scheduler_id, worker="worker-1", lease_s=lease_s)
        assert not isinstance(claim, Gathering)
        return claim


def next_evaluation(engine: Engine, scheduler_id: uuid.UUID) -> ClaimedEvaluation | None:
    with Session(engine) as session, session.begin():
        promote(session)
        return claim_evaluation(session, scheduler_id=scheduler_id, worker="worker-1", lease_s=LEASE_S)


def checkpoint_of(claim: ClaimedSegment, step: int, *, scheduled: bool = True, digest: str = "") -> Checkpoint:
    """What training would yield at `step`."""
    segment = claim.run.segment
    return Checkpoint(
        ref=CheckpointRef(segment=segment.id, step=step),
        path=f"checkpoints/{segment.id}/{step}",
        digest=digest or content_hash([segment.id, step]),
        size_bytes=1,
        stage_tokens=segment.stage_tokens(step),
        scheduled=scheduled,
        mean_loss=1.0,
    )


def evaluation_result(log_longppl: float | None = 2.0) -> Evaluation:
    document = DocumentScore(key_sum=2.0, key_count=1, short_sum=6.0, short_count=3, all_sum=9.0, all_count=4)
    return Evaluation(
        log_longppl=log_longppl,
        log_longppl_se=None,
        log_shortppl=2.0,
        log_shortppl_se=0.1,
        log_ppl=2.25,
        log_ppl_se=0.1,
        key_gap=None,
        key_count=0 if log_longppl is None else 1,
        short_count=3,
        all_count=4,
        documents=(document,),
        reason="no key token" if log_longppl is None else None,
    )


def train(engine: Engine, claim: ClaimedSegment) -> None:
    """Brings a claimed run to its end."""
    with Session(engine) as session, session.begin():
        for step in claim.run.save_steps:
            assert record_checkpoint(session, claim.token, checkpoint_of(claim, step))
        assert finish_segment(session, claim.token)


def run_all(engine: Engine, scheduler_id: uuid.UUID) -> tuple[list[ClaimedSegment], list[ClaimedEvaluation]]:
    """Brings everything that is open to its end; returns what was claimed, in order."""
    segments: list[ClaimedSegment] = []
    evaluations: list[ClaimedEvaluation] = []
    while True:
        segment = next_segment(engine, scheduler_id)
        if segment is not None:
            segments.append(segment)
            train(engine, segment)
            continue
        evaluation = next_evaluation(engine, scheduler_id)
        if evaluation is None:
            return segments, evaluations
        evaluations.append(evaluation)
        with Session(engine) as session, session.begin():
            assert record_evaluation(session, evaluation.token, evaluation_result())


def segment_row(engine: Engine, key: str) -> Segment:
    """The newest generation of a segment."""
    with Session(engine) as session:
        return session.scalars(
            select(Segment).where(Segment.key == key).order_by(Segment.generation.desc()).limit(1)
        ).one()
