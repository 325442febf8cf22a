"""Bodies of what is kept beside the fitted numbers: how training went, and what probes found."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from api.models import Body, Count, Id, Number, WorkState

SegmentKind = Literal["short_trunk", "short_decay", "long_constant", "long_linear_decay", "follow_up"]


class TrainingPoint(Body):
    step: Count = Field(description="Of the segment, from 1.")
    loss: float = Field(description="Of that step, in nats per token.")
    gradient_norm: Number = Field(description="Before clipping.")
    learning_rate: float
    tokens_per_s: float = Field(description="Since the point before.")
    mfu: Number = Field(
        description="Share of the device's peak operations that the model's own reach; null where no peak is stated."
    )


class LivePoint(Body):
    step: Count
    loss: Number
    tokens_per_s: Number


class TrainingSeries(Body):
    """How training of one segment went."""

    segment: Id
    scale: str
    kind: SegmentKind
    state: WorkState
    parent: Id | None = Field(description="The segment that it goes on from; null for one that begins anew.")
    parent_step: Count | None = Field(description="Where it leaves its parent.")
    tokens_per_step: Count = Field(description="Step times this are the segment's own tokens.", examples=[524_288])
    tokens_before: Count = Field(description="Tokens that its ancestors trained up to where it begins.")
    live: LivePoint | None = Field(
        description="Where the attempt that runs now is, by its newest report; what it did is not durable yet."
    )
    points: tuple[TrainingPoint, ...] = Field(description="By rising step, evenly spread.")


class ProbeMetric(Body):
    """One number of a probe, and the model that it is of."""

    id: Id
    evaluation_id: Id = Field(description="A snapshot and a set of probes.")
    segment: Id
    step: Count
    rule: str = Field(examples=["raw", "last_m"])
    follow_up: str | None = Field(description="The stage that led on from D_l, by its name; null for the long stage.")
    scale: str
    n_params: Count
    short_tokens: Count | None = Field(description="D_s; null where nobody knows what a model from elsewhere has seen.")
    long_tokens: Count
    short_seed: Count
    long_seed: Count
    metric: str = Field(examples=["passkey_accuracy", "needle_nll", "position_loss", "retrieval_heads"])
    value: float
    count: Count = Field(description="Samples or tokens behind the value.")
    length: Count | None = Field(description="Of the context, in tokens.")
    depth: float | None = Field(description="The place looked at, as a share of the context.", examples=[0.5])
    label: str | None = Field(description="What tells numbers of one metric apart.", examples=["niah_single_1", "2.5"])
