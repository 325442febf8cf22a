"""What a plan says, as plain values. `docs/grid.md` explains them, `orchestrator.plan_document` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import Problem
from workers.probe_spec import ProbeSet
from workers.spec import (
    CheckpointRef,
    DecayShape,
    Evaluator,
    Execution,
    FolderModel,
    ModelShape,
    Protocol,
    Segment,
    Snapshot,
    Yarn,
    content_hash,
    optional,
)

EvaluationState = Literal["new", "in_flight", "evaluated"]
CellStatus = Literal["reused", "in_flight", "extended", "new"]

#: The metric that the law is fitted to.
METRIC = "log_longppl"


def evaluation_key(snapshot_id: str, evaluator_id: str) -> str:
    """The identity of one evaluation: which model, measured how."""
    return content_hash({"snapshot": snapshot_id, "evaluator": evaluator_id})


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSegment:
    """A segment that the results database has heard of.

    `saved_steps` have a durable checkpoint; `scheduled_steps` will have one without this plan (other grids ask for them
    and the work is not given up). The two may overlap.
    """

    saved_steps: Set[int] = frozenset()
    scheduled_steps: Set[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What exists or is on its way, so that a plan asks for the rest only. Evaluations are named by their keys."""

    segments: Mapping[str, KnownSegment] = field(default_factory=dict)
    evaluated: Set[str] = frozenset()
    in_flight: Set[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one fit may pool. `rule` has its parameters as written ("last_m(m=4, spacing=2N)"), the same for all scales.

    `final_rate_ratio` is the floor of the linear decay, and 1 for the constant protocol; `decay_shape` is its shape.
    """

    family: str
    protocol: Protocol
    final_rate_ratio: float
    rule: str
    evaluator: str
    metric: str = METRIC
    decay_shape: DecayShape = optional("linear")

    @property
    def id(self) -> str:
        return content_hash(self)

    @property
    def label(self) -> str:
        return f"{self.protocol}, {self.rule} (recipe {self.family[:8]}, evaluator {self.evaluator[:8]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """A segment that the grid's cells pass through, and what of it is still to be trained.

    `save_steps` are all checkpoints the grid reads or branches from; `missing_steps` those that must be trained and
    saved for it, in order. `tokens_train`, `flops` and `checkpoint_bytes` price the missing ones alone; `cells` counts
    the cells that pass through.
    """

    id: str
    segment: Segment
    scale: str
    save_steps: tuple[int, ...]
    missing_steps: tuple[int, ...]
    tokens_train: int
    flops: int
    checkpoint_bytes: int
    cells: int
    execution: Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation:
    """A snapshot to measure. `asked`: a cell's budget; otherwise a diagnostic, which is measured and never fitted.

    `sources` are the checkpoints to read, oldest first: the snapshot's own, or, for a snapshot at step 0 of a
    long-stage segment, the checkpoint it starts from (none where that is a folder). `rope_base` and `yarn` are what the
    model is run with. Tokens are the realised ones, D_s None where nobody knows it. `cluster` names the short-stage
    checkpoint whose noise all its long-stage runs share. `follow_up` names the stage that led on from D_l, if one did.
    """

    key: str
    snapshot: Snapshot
    evaluator: Evaluator | ProbeSet
    sources: tuple[CheckpointRef, ...]
    shape: ModelShape | FolderModel
    rope_base: float
    yarn: Yarn | None
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    cluster: str
    asked: bool
    state: EvaluationState
    flops: int
    follow_up: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """A cell with its realised budgets. `evaluations[i]`, one for each rule, belongs to `series[i]`."""

    key: str
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    evaluations: tuple[str, ...]
    series: tuple[str, ...]
    status: CellStatus
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTotals:
    """One scale's share. A trunk that two scales share counts for the first of them."""

    scale: str
    n_params: int
    cells: int
    tokens_train: int
    tokens_independent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The least training that covers a grid, beside what is known. Parents stand before their children in `segments`.

    `evaluator` measures the cells; `evaluators` are all, those of follow-up stages included. `tokens_independent` is
    the price of training every cell by itself, from scratch or from its folder, and each follow-up stage. Operations
    are exact integers and may exceed 64 bits; those of a reference model's own passes are not known here and not
    counted.
    """

    name: str
    protocol: Protocol
    family: str
    evaluator: Evaluator
    evaluators: tuple[Evaluator | ProbeSet, ...]
    series: tuple[Series, ...]
    segments: tuple[PlannedSegment, ...]
    evaluations: tuple[PlannedEvaluation, ...]
    cells: tuple[PlannedCell, ...]
    per_scale: tuple[ScaleTotals, ...]
    tokens_train: int
    tokens_independent: int
    train_flops: int
    evaluation_flops: int
    checkpoint_bytes: int
    gpu_hours: float
    gpu_flops: float
    gpu_utilisation: float
    warnings: tuple[Problem, ...]

    @property
    def flops(self) -> int:
        return self.train_flops + self.evaluation_flops
