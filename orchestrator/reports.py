"""What a worker says about the attempt it works on. Plain values, free of Ray and torch."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from workers.results import Checkpoint, Evaluation, TrainProgress
from workers.spec import CheckpointRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """A sign of life; only the newest one is kept."""

    token: uuid.UUID
    progress: TrainProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint lies in the store."""

    token: uuid.UUID
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The evaluation is done; the attempt is over."""

    token: uuid.UUID
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The stretch is trained and its checkpoints were reported; the attempt is over."""

    token: uuid.UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The attempt ended early because it was asked to, by its own will or by force."""

    token: uuid.UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempt raised `error` (a class name); `traceback` is the end of where. `checkpoint` could not be read."""

    token: uuid.UUID
    error: str
    message: str
    traceback: str
    checkpoint: CheckpointRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The worker process died, or answers no more; `reason` is all that is known."""

    token: uuid.UUID
    reason: str


Report = Progressed | Saved | Measured | Trained | Stopped | Failed | Lost
#: Reports after which the worker is free again.
FINAL = (Measured, Trained, Stopped, Failed, Lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """A report in a worker's spool; numbers count up from 1 as long as the process lives."""

    number: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A report and the worker it came from."""

    worker: str
    report: Report
