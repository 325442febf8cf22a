"""What training and measuring yield, as plain values: checkpoints, signs of life, evaluations. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.spec import CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPoint:
    """How training went at one step: loss in nats, norm of the gradient before clipping, speed.

    `mfu` is the share of the device's peak operations that the model's own operations reach; None where no peak is
    stated for the device.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_s: float
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What training yields: a durable checkpoint, already renamed into place, with the digest of its content.

    `health` are points since the checkpoint before it, evenly spaced and few, whatever the number of steps.
    """

    ref: CheckpointRef
    path: str
    digest: str
    size_bytes: int
    stage_tokens: int
    scheduled: bool
    mean_loss: float | None
    health: tuple[HealthPoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """A sign of life between checkpoints."""

    step: int
    stage_tokens: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a probe, such as "passkey_accuracy", over `count` samples or tokens.

    `length` is that of the context in tokens, `depth` the place looked at as a share of it in [0, 1], `label` whatever
    else tells metrics of one name apart (a task, a head).
    """

    name: str
    value: float
    count: int
    length: int | None = None
    depth: float | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentScore:
    """Sums of NLL (nats) and counts of tokens of one evaluation document.

    `key_local_sum` is the evaluated model's own NLL on the key tokens when it sees only the local chunk; None unless
    the evaluator asks for the gap.
    """

    key_sum: float
    key_count: int
    short_sum: float
    short_count: int
    all_sum: float
    all_count: int
    key_local_sum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Token-pooled metrics (nats) of one snapshot; None, with a reason, where no token qualifies.

    Standard errors are over documents.
    """

    log_longppl: float | None
    log_longppl_se: float | None
    log_shortppl: float | None
    log_shortppl_se: float | None
    log_ppl: float | None
    log_ppl_se: float | None
    key_gap: float | None
    key_count: int
    short_count: int
    all_count: int
    documents: tuple[DocumentScore, ...]
    reason: str | None = None
    metrics: tuple[Metric, ...] = ()


def probed(metrics: tuple[Metric, ...]) -> Evaluation:
    """What a set of probes found, as an evaluation without perplexities."""
    return Evaluation(
        log_longppl=None,
        log_longppl_se=None,
        log_shortppl=None,
        log_shortppl_se=None,
        log_ppl=None,
        log_ppl_se=None,
        key_gap=None,
        key_count=0,
        short_count=0,
        all_count=0,
        documents=(),
        reason="probes only: no perplexity was asked for",
        metrics=metrics,
    )
