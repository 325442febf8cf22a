"""The tables. Every statement on them lives in this package; what others may read is the schema `research`.

Work (segments and evaluations) follows `PENDING -> READY -> RUNNING -> SUCCEEDED | FAILED | CANCELLED`. A row is one
*generation* of an identity (`key`): at most one generation is open, a later claim on a closed one opens the next, and
closed rows never change. Checkpoints belong to the identity, not to a generation, so nothing trained is ever lost.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, Integer, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from database.columns import Base as Base  # what is migrated: all tables below
from database.columns import created, finite, identity, one_of

WORK_STATES = ("PENDING", "READY", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")
ATTEMPT_STATES = ("RUNNING", "SUCCEEDED", "FAILED", "LOST", "STOPPED")
CLAIM_ENDS = ("FAILED", "CANCELLED")
FIT_STATES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED")
OPEN_STATES = ("PENDING", "READY", "RUNNING")
OPEN = "state IN ('PENDING', 'READY', 'RUNNING')"
GIVEN_UP = "state IN ('FAILED', 'CANCELLED')"
REOPENED = "generation > 1"


class Grid(Base):
    """What a user submitted, verbatim (`document`), with its planned totals.

    Nothing begins that only grids with a `paused_at` ask for. One with a `cancelled_at` asks for nothing any more.
    """

    __tablename__ = "grids"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    name: Mapped[str]
    protocol: Mapped[str]
    document: Mapped[dict[str, Any]]
    document_hash: Mapped[str]
    tokens_train: Mapped[int]
    tokens_independent: Mapped[int]
    flops: Mapped[float]
    gpu_hours: Mapped[float]
    holdout: Mapped[str | None]
    bootstrap: Mapped[int]
    created_at: Mapped[dt.datetime] = created()
    paused_at: Mapped[dt.datetime | None]
    cancelled_at: Mapped[dt.datetime | None]
    __table_args__ = (
        CheckConstraint(one_of("protocol", ("constant", "linear_decay")), name="protocol"),
        CheckConstraint("tokens_train >= 0 AND tokens_independent >= 0", name="tokens"),
        CheckConstraint("paused_at IS NULL OR cancelled_at IS NULL", name="paused_or_cancelled"),
        Index(None, "created_at", "id"),
        Index("ix_grids_paused", "paused_at", postgresql_where=text("paused_at IS NOT NULL")),
    )


class Series(Base):
    """What one fit may pool: recipe family, protocol, rule, evaluator, metric. `id` is the hash of those."""

    __tablename__ = "series"
    id: Mapped[str] = mapped_column(primary_key=True)
    family: Mapped[str]
    protocol: Mapped[str]
    rule: Mapped[str]
    evaluator_id: Mapped[str] = mapped_column(ForeignKey("evaluators.id"), index=True)
    metric: Mapped[str]
    label: Mapped[str]
    created_at: Mapped[dt.datetime] = created()


class Evaluator(Base):
    """Reference, documents, thresholds and chunking; `id` is the hash of `spec`."""

    __tablename__ = "evaluators"
    id: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    created_at: Mapped[dt.datetime] = created()


class Segment(Base):
    """One generation of a segment: `spec` is the `workers.spec.Segment`, `target_step` its last scheduled checkpoint.

    `execution` is how it is run, the same for every attempt; what it leaves out has its default. `priority` orders what
    is ready: FLOPs of the longest chain of training that begins here.
    """

    __tablename__ = "segments"
    id: Mapped[int] = identity()
    key: Mapped[str]
    generation: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str]
    scale: Mapped[str]
    parent_key: Mapped[str | None]
    parent_step: Mapped[int | None]
    spec: Mapped[dict[str, Any]]
    execution: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    tokens_per_step: Mapped[int]
    target_step: Mapped[int]
    priority: Mapped[float] = mapped_column(server_default=text("0"))
    state: Mapped[str] = mapped_column(server_default="PENDING")
    reason: Mapped[str | None]
    not_before: Mapped[dt.datetime | None]
    user_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    infrastructure_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    created_at: Mapped[dt.datetime] = created()
    ended_at: Mapped[dt.datetime | None]
    __table_args__ = (
        UniqueConstraint("key", "generation"),
        Index("uq_segments_open", "key", unique=True, postgresql_where=text(OPEN)),
        Index("ix_segments_claimable", "state", text("priority DESC"), "id", postgresql_where=text(OPEN)),
        Index(None, "parent_key", "parent_step"),
        Index("ix_segments_reopened", "key", "generation", postgresql_where=text(REOPENED)),
        CheckConstraint(one_of("state", WORK_STATES), name="state"),
        CheckConstraint(
            one_of("kind", ("short_trunk", "short_decay", "long_constant", "long_linear_decay", "follow_up")),
            name="kind",
        ),
        CheckConstraint("target_step > 0 AND tokens_per_step > 0", name="positive"),
        CheckConstraint("(parent_key IS NULL) = (parent_step IS NULL)", name="parent"),
        CheckConstraint("(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))", name="ended"),
    )


class SegmentSave(Base):
    """A scheduled checkpoint of a segment: an observation rule or a branch needs it."""

    __tablename__ = "segment_saves"
    segment_key: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    __table_args__ = (CheckConstraint("step > 0", name="step"),)


class SegmentSource(Base):
    """A checkpoint of its parent that a segment is merged from where it begins with a rule's model."""

    __tablename__ = "segment_sources"
    segment_key: Mapped[str] = mapped_column(primary_key=True)
    source_key: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    __table_args__ = (Index(None, "source_key", "step"), CheckConstraint("step > 0", name="step"))


class Checkpoint(Base):
    """A durable checkpoint: the file lies in the store under `path` and has this digest."""

    __tablename__ = "checkpoints"
    id: Mapped[int] = identity()
    segment_key: Mapped[str]
    step: Mapped[int]
    stage_tokens: Mapped[int]
    path: Mapped[str]
    digest: Mapped[str]
    size_bytes: Mapped[int]
    scheduled: Mapped[bool]
    mean_loss: Mapped[float | None]
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), index=True)
    created_at: Mapped[dt.datetime] = created()
    __table_args__ = (
        UniqueConstraint("segment_key", "step"),
        CheckConstraint("step > 0 AND stage_tokens > 0 AND size_bytes > 0", name="positive"),
        CheckConstraint(finite("mean_loss"), name="mean_loss"),
    )


class Evaluation(Base):
    """One generation of an evaluation: a snapshot measured by an evaluator. Metrics are nats, pooled over tokens.

    `short_tokens` is NULL where nobody knows what a model from elsewhere was trained on. `follow_up` names the stage
    that led on from `long_tokens`; such a row is never fitted.
    """

    __tablename__ = "evaluations"
    id: Mapped[int] = identity()
    key: Mapped[str]
    generation: Mapped[int] = mapped_column(Integer)
    snapshot_id: Mapped[str]
    segment_key: Mapped[str]
    step: Mapped[int]
    rule: Mapped[dict[str, Any]]
    evaluator_id: Mapped[str] = mapped_column(ForeignKey("evaluators.id"), index=True)
    scale: Mapped[str]
    n_params: Mapped[int]
    short_tokens: Mapped[int | None]
    long_tokens: Mapped[int]
    short_seed: Mapped[int]
    long_seed: Mapped[int]
    cluster: Mapped[str]
    follow_up: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default="PENDING")
    reason: Mapped[str | None]
    not_before: Mapped[dt.datetime | None]
    user_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    infrastructure_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    log_longppl: Mapped[float | None]
    log_longppl_se: Mapped[float | None]
    log_shortppl: Mapped[float | None]
    log_shortppl_se: Mapped[float | None]
    log_ppl: Mapped[float | None]
    log_ppl_se: Mapped[float | None]
    key_gap: Mapped[float | None]
    key_count: Mapped[int | None]
    short_count: Mapped[int | None]
    all_count: Mapped[int | None]
    documents: Mapped[list[Any] | None]
    created_at: Mapped[dt.datetime] = created()
    ended_at: Mapped[dt.datetime | None]
    __table_args__ = (
        UniqueConstraint("key", "generation"),
        Index("uq_evaluations_open", "key", unique=True, postgresql_where=text(OPEN)),
        Index("uq_evaluations_succeeded", "key", unique=True, postgresql_where=text("state = 'SUCCEEDED'")),
        Index("ix_evaluations_claimable", "state", "id", postgresql_where=text(OPEN)),
        Index("ix_evaluations_given_up", "key", postgresql_where=text(GIVEN_UP)),
        Index("ix_evaluations_reopened", "key", "generation", postgresql_where=text(REOPENED)),
        Index(
            "ix_evaluations_unmeasured",
            "key",
            "generation",
            postgresql_include=["state", "segment_key"],
            postgresql_where=text("state <> 'SUCCEEDED'"),
        ),
        Index(None, "segment_key", "step"),
        CheckConstraint(one_of("state", WORK_STATES), name="state"),
        CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens >= 0", name="sizes"),
        CheckConstraint("(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))", name="ended"),
        CheckConstraint(
            "state <> 'SUCCEEDED' OR (all_count IS NOT NULL AND (log_longppl IS NOT NULL OR reason IS NOT NULL))",
            name="measured",
        ),
        CheckConstraint(finite("log_longppl", "log_shortppl", "log_ppl", "key_gap"), name="numbers"),
        CheckConstraint(finite("log_longppl_se", "log_shortppl_se", "log_ppl_se"), name="standard_errors"),
    )


class TrainingPoint(Base):
    """How training went at one step of a segment; their number is bounded (`database.measures`)."""

    __tablename__ = "training_points"
    segment_key: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    loss: Mapped[float]
    gradient_norm: Mapped[float]
    learning_rate: Mapped[float]
    tokens_per_s: Mapped[float]
    mfu: Mapped[float | None]
    __table_args__ = (
        CheckConstraint("step > 0", name="step"),
        CheckConstraint(finite("loss"), name="loss"),
    )


class Metric(Base):
    """One number of a probe, as `workers.results.Metric` has it."""

    __tablename__ = "metrics"
    id: Mapped[int] = identity()
    evaluation_id: Mapped[int] = mapped_column(ForeignKey("evaluations.id"), index=True)
    name: Mapped[str]
    value: Mapped[float]
    count: Mapped[int]
    length: Mapped[int | None]
    depth: Mapped[float | None]
    label: Mapped[str | None]
    __table_args__ = (
        CheckConstraint("count > 0", name="count"),
        CheckConstraint(finite("value"), name="value"),
        CheckConstraint("length > 0 AND depth BETWEEN 0 AND 1", name="place"),
    )


class EvaluationSource(Base):
    """A checkpoint that an evaluation's snapshot is merged from."""

    __tablename__ = "evaluation_sources"
    evaluation_key: Mapped[str] = mapped_column(primary_key=True)
    segment_key: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    __table_args__ = (Index(None, "segment_key", "step"),)


class Cell(Base):
    """A cell that a grid asks to have measured; counts are the realised ones."""

    __tablename__ = "cells"
    id: Mapped[int] = identity()
    grid_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("grids.id"))
    key: Mapped[str]
    scale: Mapped[str]
    n_params: Mapped[int]
    short_tokens: Mapped[int | None]
    long_tokens: Mapped[int]
    short_seed: Mapped[int]
    long_seed: Mapped[int]
    plan_status: Mapped[str]
    __table_args__ = (
        UniqueConstraint("grid_id", "key"),
        Index(None, "grid_id", "id"),
        CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens > 0", name="sizes"),
        CheckConstraint(one_of("plan_status", ("reused", "in_flight", "extended", "new")), name="plan_status"),
    )


class CellEvaluation(Base):
    """A cell is measured once per rule: its evaluation and the series that the measurement belongs to."""

    __tablename__ = "cell_evaluations"
    cell_id: Mapped[int] = mapped_column(ForeignKey("cells.id"), primary_key=True)
    evaluation_key: Mapped[str] = mapped_column(primary_key=True, index=True)
    series_id: Mapped[str] = mapped_column(ForeignKey("series.id"), index=True)


class GridSegment(Base):
    """A grid's claim on a segment. `closed_as` is how a claim ended that its grid's cancellation withdrew."""

    __tablename__ = "grid_segments"
    grid_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("grids.id"), primary_key=True)
    segment_key: Mapped[str] = mapped_column(primary_key=True, index=True)
    target_step: Mapped[int]
    closed_as: Mapped[str | None]
    __table_args__ = (CheckConstraint(one_of("closed_as", CLAIM_ENDS), name="closed_as"),)


class GridEvaluation(Base):
    """A grid's claim on an evaluation (its cells' and its diagnostics'). `closed_as`: see `GridSegment`.

    For a grid whose claim is closed the evaluation stays what the claim says, whatever others make of it.
    """

    __tablename__ = "grid_evaluations"
    grid_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("grids.id"), primary_key=True)
    evaluation_key: Mapped[str] = mapped_column(primary_key=True, index=True)
    closed_as: Mapped[str | None]
    __table_args__ = (
        Index(
            "ix_grid_evaluations_closed",
            "grid_id",
            "evaluation_key",
            postgresql_include=["closed_as"],
            postgresql_where=text("closed_as IS NOT NULL"),
        ),
        CheckConstraint(one_of("closed_as", CLAIM_ENDS), name="closed_as"),
    )


class Attempt(Base):
    """One try at a segment or an evaluation. `token` fences: a write that carries another token changes nothing."""

    __tablename__ = "attempts"
    id: Mapped[int] = identity()
    segment_id: Mapped[int | None] = mapped_column(ForeignKey("segments.id"))
    evaluation_id: Mapped[int | None] = mapped_column(ForeignKey("evaluations.id"))
    number: Mapped[int] = mapped_column(Integer)
    token: Mapped[uuid.UUID] = mapped_column(unique=True)
    scheduler_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("schedulers.id"), index=True)
    worker: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="RUNNING")
    failure_kind: Mapped[str | None]
    reason: Mapped[str | None]
    start_step: Mapped[int | None]
    progress_step: Mapped[int | None]
    target_step: Mapped[int | None]
    loss: Mapped[float | None]
    tokens_per_s: Mapped[float | None]
    lease_expires_at: Mapped[dt.datetime]
    started_at: Mapped[dt.datetime] = created()
    ended_at: Mapped[dt.datetime | None]
    __table_args__ = (
        Index("uq_attempts_live_segment", "segment_id", unique=True, postgresql_where=text("state = 'RUNNING'")),
        Index("uq_attempts_live_evaluation", "evaluation_id", unique=True, postgresql_where=text("state = 'RUNNING'")),
        Index(None, "segment_id", "number", unique=True),
        Index(None, "evaluation_id", "number", unique=True),
        CheckConstraint("(segment_id IS NULL) <> (evaluation_id IS NULL)", name="one_subject"),
        CheckConstraint(one_of("state", ATTEMPT_STATES), name="state"),
        CheckConstraint(one_of("failure_kind", ("user", "infrastructure")), name="failure_kind"),
        CheckConstraint("(ended_at IS NULL) = (state = 'RUNNING')", name="ended"),
    )


class Scheduler(Base):
    """A scheduler process and when it was last seen: why-pending says so when none is alive."""

    __tablename__ = "schedulers"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    workers: Mapped[int] = mapped_column(Integer)
    leading: Mapped[bool]
    started_at: Mapped[dt.datetime] = created()
    seen_at: Mapped[dt.datetime] = created()


class Observation(Base):
    """A row the law is fitted to: y = log_longppl at (N, D_s, D_l). Never changed and never deleted: fits name it.

    A row that was run is known by its evaluation, an imported one by its sizes and seeds.
    """

    __tablename__ = "observations"
    id: Mapped[int] = identity()
    series_id: Mapped[str] = mapped_column(ForeignKey("series.id"))
    evaluation_key: Mapped[str | None]
    scale: Mapped[str]
    n_params: Mapped[int]
    short_tokens: Mapped[int | None]
    long_tokens: Mapped[int]
    short_seed: Mapped[int]
    long_seed: Mapped[int]
    cluster: Mapped[str]
    y: Mapped[float]
    y_se: Mapped[float | None]
    source: Mapped[str]
    created_at: Mapped[dt.datetime] = created()
    __table_args__ = (
        UniqueConstraint("series_id", "evaluation_key"),
        Index(
            "uq_observations_imported",
            "series_id",
            "n_params",
            text("coalesce(short_tokens, 0)"),
            "long_tokens",
            "short_seed",
            "long_seed",
            unique=True,
            postgresql_where=text("source = 'imported'"),
        ),
        Index(None, "series_id", "id"),
        Index(None, "series_id", "y", "id"),
        Index(None, "y", "id"),
        CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens > 0", name="sizes"),
        CheckConstraint(finite("y", "y_se"), name="y"),
        CheckConstraint(one_of("source", ("run", "imported")), name="source"),
    )


class Fit(Base):
    """A law fitted to a frozen set of observations, `fit_observations`, written with it. Closed, it never changes.

    `n_draws_ok` of the `bootstrap` refits asked for were good; their parameters are kept unless intervals are withheld.
    """

    __tablename__ = "fits"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    series_id: Mapped[str] = mapped_column(ForeignKey("series.id"))
    law: Mapped[str]
    holdout: Mapped[str | None]
    bootstrap: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(server_default="PENDING")
    reason: Mapped[str | None]
    status: Mapped[str | None]
    last_observation_id: Mapped[int]
    objective: Mapped[float | None]
    gradient_norm: Mapped[float | None]
    huber_delta: Mapped[float | None]
    level: Mapped[float | None]
    seed: Mapped[int | None]
    n_draws_ok: Mapped[int | None] = mapped_column(Integer)
    jacobian_rank: Mapped[int | None] = mapped_column(Integer)
    n_observations: Mapped[int | None] = mapped_column(Integer)
    n_clusters: Mapped[int | None] = mapped_column(Integer)
    residual_std: Mapped[float | None]
    r2: Mapped[float | None]
    mape_log: Mapped[float | None]
    holdout_n: Mapped[int | None] = mapped_column(Integer)
    holdout_r2: Mapped[float | None]
    holdout_mape_log: Mapped[float | None]
    holdout_mape_ppl: Mapped[float | None]
    holdout_bias: Mapped[float | None]
    n_params_min: Mapped[float | None]
    n_params_max: Mapped[float | None]
    short_tokens_min: Mapped[float | None]
    short_tokens_max: Mapped[float | None]
    long_tokens_min: Mapped[float | None]
    long_tokens_max: Mapped[float | None]
    warnings: Mapped[list[Any] | None]
    explanation: Mapped[list[Any] | None]
    created_at: Mapped[dt.datetime] = created()
    ended_at: Mapped[dt.datetime | None]
    __table_args__ = (
        Index(None, "series_id", "created_at", "id"),
        Index(
            "uq_fits_open",
            "series_id",
            "law",
            text("coalesce(holdout, '')"),
            unique=True,
            postgresql_where=text("state IN ('PENDING', 'RUNNING')"),
        ),
        CheckConstraint(one_of("state", FIT_STATES), name="state"),
        CheckConstraint("state <> 'SUCCEEDED' OR (status IS NOT NULL AND objective IS NOT NULL)", name="fitted"),
        CheckConstraint("state <> 'FAILED' OR reason IS NOT NULL", name="reason"),
        CheckConstraint("(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED'))", name="ended"),
        CheckConstraint("bootstrap >= 0", name="bootstrap"),
        CheckConstraint(finite("objective", "residual_std"), name="numbers"),
    )


class FitParameter(Base):
    """A parameter for absolute counts; no interval where it is at a bound or open, or where intervals are withheld."""

    __tablename__ = "fit_parameters"
    fit_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("fits.id"), primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
    low: Mapped[float | None]
    high: Mapped[float | None]
    at_bound: Mapped[bool]
    identifiable: Mapped[bool]
    __table_args__ = (UniqueConstraint("fit_id", "position"), CheckConstraint(finite("value"), name="value"))


class FitObservation(Base):
    """Which observations a fit used: `fitted`, `held_out` (predicted, never fitted) or `excluded` (with a reason).

    The rows are written when the fit is queued; `role` and the rest are None until it has succeeded.
    """

    __tablename__ = "fit_observations"
    fit_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("fits.id"), primary_key=True)
    observation_id: Mapped[int] = mapped_column(ForeignKey("observations.id"), primary_key=True, index=True)
    role: Mapped[str | None]
    reason: Mapped[str | None]
    predicted: Mapped[float | None]
    low: Mapped[float | None]
    high: Mapped[float | None]
    __table_args__ = (
        CheckConstraint(one_of("role", ("fitted", "held_out", "excluded")), name="role"),
        CheckConstraint("role <> 'excluded' OR reason IS NOT NULL", name="reason"),
    )


class FitDraw(Base):
    """A bootstrap refit, parameters in the law's order: REST and SQL read intervals from the same draws."""

    __tablename__ = "fit_draws"
    fit_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("fits.id"), primary_key=True)
    draw: Mapped[int] = mapped_column(Integer, primary_key=True)
    amplitude_n: Mapped[float]
    alpha: Mapped[float]
    amplitude_s: Mapped[float]
    beta_s: Mapped[float]
    amplitude_l: Mapped[float]
    beta_l: Mapped[float]
    offset: Mapped[float]


class Event(Base):
    """What happened, in order: the audit trail, written in the transaction of the change."""

    __tablename__ = "events"
    id: Mapped[int] = identity()
    at: Mapped[dt.datetime] = created()
    kind: Mapped[str]
    grid_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("grids.id"), index=True)
    subject: Mapped[str]
    payload: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))


class IdempotencyKey(Base):
    """A creating POST that was answered: stored in the transaction of the resource it made."""

    __tablename__ = "idempotency_keys"
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    response: Mapped[dict[str, Any]]
    created_at: Mapped[dt.datetime] = created()
