"""What goes over the wire: request and response bodies of `/v1`. The Python client reads the same classes.

Counts of tokens and parameters are int64: JavaScript rounds those above 2^53, so a page shows what it was given as
text. Times are RFC 3339 in UTC. A number that does not exist is null; NaN and infinity never appear.
"""

from __future__ import annotations

import datetime as dt
import math
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

GridState = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
Verb = Literal["cancel", "pause", "resume", "retry-failed"]
CellState = Literal["PENDING", "RUNNING", "MEASURED", "FAILED", "CANCELLED"]
WorkState = Literal["PENDING", "READY", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
FitState = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED"]


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_utc(value: Any) -> Any:
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) else value


Number = Annotated[float | None, BeforeValidator(_finite_or_none)]
Count = Annotated[int, Field(json_schema_extra={"format": "int64"})]
Time = Annotated[dt.datetime, BeforeValidator(_in_utc)]
Id = Annotated[str, BeforeValidator(str)]
T = TypeVar("T")


class Body(BaseModel):
    """A response body. Read straight from the database's records, by attribute."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    @classmethod
    def of(cls, *records: object) -> Self:
        """The body that several records make together: each field comes from the first record that has it."""
        values = {}
        for name in cls.model_fields:
            values[name] = getattr(next(record for record in records if hasattr(record, name)), name)
        return cls.model_validate(values)


class Request(BaseModel):
    """A request body: unknown fields are errors, and so is a number in quotes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Page(Body, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None = Field(description="Pass it as `cursor` for the next page; null on the last one.")


class Health(Body):
    status: Literal["ok"]
    version: str


class Readiness(Body):
    status: Literal["ready"]
    database: str = Field(description="The database's URL without its password.")
    revision: str | None


class GridSummary(Body):
    id: Id
    name: str
    protocol: Literal["constant", "linear_decay"]
    state: GridState
    paused_at: Time | None = Field(description="Since when nothing begins for it; null where it is not paused.")
    created_at: Time
    holdout: str | None
    tokens_train: Count = Field(description="Tokens that this grid had to train when it was submitted.")
    tokens_independent: Count = Field(description="Tokens that its cells would train if nothing were shared.")
    flops: float
    gpu_hours: float


class ScaleProgress(Body):
    scale: str
    tokens_done: Count = Field(description="Durable tokens plus those of running attempts, of `tokens_total`.")
    tokens_total: Count
    tokens_per_s: float = Field(description="Of the attempts that run now.")
    segments: dict[WorkState, int]
    evaluations: dict[WorkState, int]


class RunningAttempt(Body):
    kind: Literal["SEGMENT", "EVALUATION"]
    what: str = Field(
        description="Kind of the segment, or the rule of the evaluation and its follow-up stage.",
        examples=["long_constant"],
    )
    scale: str
    number: int = Field(description="1 for the first try.")
    worker: str
    started_at: Time
    step: Count | None
    target_step: Count | None
    loss: Number
    tokens_per_s: Number


class GridCreated(Body):
    id: Id
    name: str
    plan: dict[str, Any] = Field(
        description="The plan that was launched, without its lists; see `POST /v1/grids:plan`."
    )


class Waiting(Body):
    """Work of one scale that does not run, and why."""

    scale: str
    kind: Literal["SEGMENT", "EVALUATION"]
    why: str = Field(examples=["waiting for a free worker"])
    count: int


class Failure(Body):
    scale: str
    kind: Literal["SEGMENT", "EVALUATION"]
    reason: str
    count: int


class GridDetail(GridSummary):
    tokens_done: Count
    tokens_total: Count
    tokens_per_s: float
    eta_s: Number = Field(description="Seconds to the last token at the present rate; null where no rate is known.")
    cells: dict[CellState, int]
    scales: tuple[ScaleProgress, ...]
    attempts: tuple[RunningAttempt, ...]
    waiting: tuple[Waiting, ...]
    failures: tuple[Failure, ...]
    series: tuple[Id, ...] = Field(description="The series that its measurements belong to.")
    verbs: tuple[Verb, ...] = Field(description="What can be asked of it now: `POST /v1/grids/{id}:VERB`.")


class CellEvaluation(Body):
    id: Id
    series_id: Id
    rule: str = Field(examples=["raw", "last_m"])
    state: WorkState
    log_longppl: Number
    log_longppl_se: Number
    log_shortppl: Number
    log_shortppl_se: Number
    log_ppl: Number
    log_ppl_se: Number
    key_gap: Number = Field(
        description="NLL of key tokens under the local chunk minus under the full context, in nats."
    )
    key_count: int | None
    reason: str | None = Field(description="Why a value is null, or why the evaluation failed.")


class Cell(Body):
    id: Id
    scale: str
    n_params: Count
    short_tokens: Count | None = Field(description="D_s; null where nobody knows what a model from elsewhere has seen.")
    long_tokens: Count
    short_seed: Count
    long_seed: Count
    plan_status: Literal["reused", "in_flight", "extended", "new"]
    state: CellState
    why: str | None = Field(description="What a cell that is not measured waits for, or why it failed.")
    evaluations: tuple[CellEvaluation, ...]


class Observation(Body):
    id: Id
    series_id: Id
    evaluation_id: Id | None
    scale: str
    n_params: Count
    short_tokens: Count | None = Field(description="D_s; null where nobody knows what a model from elsewhere has seen.")
    long_tokens: Count
    short_seed: Count
    long_seed: Count
    cluster: str = Field(
        description="Short checkpoint that the row descends from: rows of one cluster share its noise."
    )
    log_longppl: float
    log_longppl_se: Number
    source: Literal["run", "imported"]
    created_at: Time


class Series(Body):
    """What one fit may pool."""

    id: Id
    label: str
    family: str
    protocol: str
    rule: str
    evaluator_id: Id
    metric: str
    created_at: Time
    observations: int
    latest_fit_id: Id | None


class Holdout(Body):
    """How the fit predicts what it has not seen; MAPE in percent, bias in nats."""

    selection: str = Field(examples=["long_tokens=max"])
    n_observations: int | None
    r2: Number
    mape_log: Number
    mape_ppl: Number
    bias: Number


class FitSummary(Body):
    id: Id
    series_id: Id
    law: str
    state: FitState
    reason: str | None
    status: str | None = Field(examples=["CONVERGED", "NOT_IDENTIFIABLE"])
    created_at: Time
    ended_at: Time | None
    n_observations: int | None
    n_clusters: int | None
    objective: Number
    residual_std: Number
    r2: Number
    mape_log: Number
    warnings: tuple[str, ...]
    holdout: Holdout | None


class Parameter(Body):
    name: str
    value: float
    low: Number
    high: Number
    at_bound: bool
    identifiable: bool


class Span(Body):
    low: Number
    high: Number


class Axes(Body, Generic[T]):
    n_params: T
    short_tokens: T
    long_tokens: T


class FitObservation(Body):
    id: Id
    role: Literal["fitted", "held_out", "excluded"] | None = Field(description="Null until the fit has succeeded.")
    reason: str | None = Field(description="Why it was excluded.")
    scale: str
    n_params: Count
    short_tokens: Count | None = Field(description="D_s; null where nobody knows what a model from elsewhere has seen.")
    long_tokens: Count
    short_seed: Count
    long_seed: Count
    log_longppl: float
    predicted: Number
    low: Number
    high: Number


class FitDetail(FitSummary):
    """A fit never changes once it is SUCCEEDED or FAILED."""

    bootstrap: int = Field(description="Refits asked for, on resampled clusters.")
    level: Number = Field(description="Nominal coverage of the intervals.")
    huber_delta: Number
    gradient_norm: Number
    parameters: tuple[Parameter, ...]
    ranges: Axes[Span] | None
    explanation: tuple[str, ...] = Field(description="What the fit knows and what it cannot know, in plain words.")
    observations: tuple[FitObservation, ...]


class PredictedPoint(Body):
    n_params: float
    short_tokens: float
    long_tokens: float
    log_longppl: float
    longppl: Number = Field(description="exp(log_longppl); null where that overflows.")
    low: Number = Field(description="Confidence interval of log_longppl: where the law itself lies.")
    high: Number
    prediction_low: Number = Field(description="Prediction interval: where one new measurement would lie.")
    prediction_high: Number
    extrapolation: Axes[float] = Field(description="How many times beyond the fitted range; 1 inside it.")
    determined: bool = Field(description="False where the observations do not fix this value.")
    warnings: tuple[str, ...]


class Predictions(Body):
    fit_id: Id
    series_id: Id
    law: str
    status: str | None = Field(examples=["CONVERGED", "NOT_IDENTIFIABLE"])
    level: float
    warnings: tuple[str, ...] = Field(description="Of the fit as a whole.")
    predictions: tuple[PredictedPoint, ...]


class ProblemPlace(Body):
    message: str
    pointer: str | None = Field(default=None, description="JSON Pointer into the body.")
    parameter: str | None = Field(default=None, description="Name of a query parameter or header.")
    line: int | None = Field(default=None, description="Line of a table, from 1, the header's included.")


class ProblemBody(Body):
    """RFC 9457."""

    type: str = Field(examples=["urn:longlaw:problem:not-found"])
    title: str
    status: int
    detail: str
    errors: tuple[ProblemPlace, ...] = ()
    state: GridState | None = Field(default=None, description="Of the grid, with `verb-not-allowed`.")
    legal_verbs: tuple[Verb, ...] | None = Field(default=None, description="What that state allows.")
