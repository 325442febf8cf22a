"""Grids in every stage of life, made with the functions that the scheduler uses, but without training anything."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from database.attempts import Failure, RetryPolicy, fail_attempt, finish_segment, record_checkpoint, record_evaluation
from database.fits import claim_fit, queue_fits, store_fit
from database.leading import heartbeat
from database.models import Evaluation as EvaluationRow
from database.work import ClaimedEvaluation, ClaimedSegment, Gathering, claim_evaluation, claim_segment, promote
from fitting.predict import log_longppl
from orchestrator.fit_job import fit_job
from orchestrator.grid import parse_grid
from orchestrator.submit import SubmittedGrid, submit
from workers.results import Checkpoint, DocumentScore, Evaluation, HealthPoint, Metric
from workers.spec import CheckpointRef

CORPUS = "0123456789abcdef0123456789abcdef"
LAW = (30.0, 0.3, 40.0, 0.3, 20.0, 0.25, 0.5)
_SCHEDULER = uuid.UUID(int=1)

Value = Callable[[EvaluationRow], float | None]
Health = Callable[[ClaimedSegment], tuple[HealthPoint, ...]]
Probes = Callable[[EvaluationRow], tuple[Metric, ...]]


def document(**changes: Any) -> dict[str, Any]:
    """A small grid: two scales x one D_s x two D_l, protocol constant."""
    return {
        "name": "small",
        "protocol": "constant",
        "scales": _scales(32, 64),
        "short_tokens": [27 * 64],
        "long_tokens": [8 * 64, 16 * 64],
        "recipe": {
            "model": {"vocab_size": 64},
            "corpus": CORPUS,
            "short": {"seq_len": 32, "batch_sequences": 2, "peak_rate": 0.01, "warmup_steps": 4},
            "long": {"seq_len": 64, "batch_sequences": 1, "rope_base": 100_000},
        },
        "evaluation": {
            "reference": {"kind": "copy"},
            "documents": {"count": 2, "length": 128},
            "chunking": {"length": 32, "stride": 16},
            "diagnose_zero": False,
        },
    } | changes


def fittable(**changes: Any) -> dict[str, Any]:
    """What determines the seven parameters: three scales x four D_s x three D_l, the largest D_l held out."""
    sizes = {"scales": _scales(32, 64, 128), "short_tokens": [1728, 3456, 5184, 6912], "long_tokens": [512, 1024, 2048]}
    return document(**sizes | {"fit": {"bootstrap": 30, "holdout": "long_tokens=largest"}} | changes)


def _scales(*widths: int) -> dict[str, Any]:
    return {f"d{width}": {"layers": 1, "width": width, "heads": 2, "ffn_width": 2 * width} for width in widths}


def submit_grid(session: Session, asked: dict[str, Any] | None = None) -> SubmittedGrid:
    """Submits a grid, `document()` by default."""
    asked = asked or document()
    return submit(session, parse_grid(asked), document=asked)


def by_law(row: EvaluationRow) -> float:
    """The law's value plus a small offset of the cell's own; a D_s that nobody knows counts as a large one."""
    short_tokens = row.short_tokens or 10**13
    exact = log_longppl(LAW, row.n_params, short_tokens, row.long_tokens or 1)
    return float(exact) + 0.01 * math.sin(row.n_params + 3 * short_tokens + 7 * row.long_tokens)


def scheduler_lives(session: Session) -> None:
    """A leading scheduler says that it is alive."""
    heartbeat(session, scheduler_id=_SCHEDULER, host="test", pid=1, workers=2, leading=True)


def next_segment(session: Session) -> ClaimedSegment | None:
    """Claims a segment. What waits for others is looked at when nothing is ready."""
    scheduler_lives(session)
    while (claim := claim_segment(session, scheduler_id=_SCHEDULER, worker="worker-0", lease_s=60)) is None:
        if not promote(session):
            return None
    assert not isinstance(claim, Gathering)
    return claim


def nothing(_: object) -> tuple[()]:
    """No points of training, no numbers of probes."""
    return ()


def train(session: Session, claimed: ClaimedSegment, health: Health = nothing) -> None:
    """Records the checkpoints that a run was to bring, and how training went up to each."""
    points = health(claimed)
    for before, step in itertools.pairwise((0, *claimed.run.save_steps)):
        name = f"{claimed.key}/{step}"
        checkpoint = Checkpoint(
            ref=CheckpointRef(segment=claimed.key, step=step),
            path=f"checkpoints/{name}",
            digest=name,
            size_bytes=1,
            stage_tokens=claimed.run.segment.stage_tokens(step),
            scheduled=True,
            mean_loss=2.0,
            health=tuple(point for point in points if before < point.step <= step),
        )
        assert record_checkpoint(session, claimed.token, checkpoint)
    assert finish_segment(session, claimed.token)


def next_evaluation(session: Session) -> ClaimedEvaluation | None:
    """Claims an evaluation. What waits for others is looked at when nothing is ready."""
    scheduler_lives(session)
    while (claim := claim_evaluation(session, scheduler_id=_SCHEDULER, worker="worker-1", lease_s=60)) is None:
        if not promote(session):
            return None
    return claim


def measure(session: Session, claimed: ClaimedEvaluation, value: Value = by_law, probes: Probes = nothing) -> None:
    """Records a measurement; a value of None means that no token qualified."""
    row = session.scalars(
        select(EvaluationRow).where(EvaluationRow.key == claimed.key, EvaluationRow.state == "RUNNING")
    ).one()
    y = value(row)
    key_count = 10 if y is not None else 0
    scores = DocumentScore(
        key_sum=10 * (y or 0.0), key_count=key_count, short_sum=20.0, short_count=10, all_sum=300.0, all_count=100
    )
    evaluation = Evaluation(
        log_longppl=y,
        log_longppl_se=0.01 if y is not None else None,
        log_shortppl=2.0,
        log_shortppl_se=0.02,
        log_ppl=3.0,
        log_ppl_se=0.03,
        key_gap=None,
        key_count=key_count,
        short_count=10,
        all_count=100,
        documents=(scores,),
        reason=None if y is not None else "no key tokens",
        metrics=probes(row),
    )
    assert record_evaluation(session, claimed.token, evaluation)


def fail_evaluation(session: Session, claimed: ClaimedEvaluation, reason: str) -> None:
    """Ends an evaluation for good."""
    failure = Failure(kind="user", reason=reason, hopeless=True)
    assert fail_attempt(session, claimed.token, failure, policy=RetryPolicy())


def finish(session: Session, value: Value = by_law, *, health: Health = nothing, probes: Probes = nothing) -> None:
    """Brings all open work to its end."""
    while (segment := next_segment(session)) is not None:
        train(session, segment, health)
    while (evaluation := next_evaluation(session)) is not None:
        measure(session, evaluation, value, probes)


def fit_all(session: Session) -> list[uuid.UUID]:
    """Queues what is to be fitted and fits it, here; the ids in the order they were fitted."""
    queue_fits(session, debounce_s=0)
    done: list[uuid.UUID] = []
    while (job := claim_fit(session)) is not None:
        assert store_fit(session, job.fit_id, fit_job(job))
        done.append(job.fit_id)
    return done
