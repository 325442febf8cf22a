"""Errors of the training and measuring code.

WorkerError
├── ModelMismatchError      the built model is not the one asked for (N, RoPE base, digest)
├── ModelMissingError       a folder holds no model that could be used
├── DivergedError           the loss became NaN or infinite, or rose too far: the user's failure, with the step
├── SegmentRunError         start, steps to save and segment of a run contradict each other
├── CheckpointError
│   ├── CheckpointMissingError
│   ├── CheckpointCorruptError   wrong digest, truncated, unreadable
│   └── CheckpointConflictError  a valid checkpoint with another content has the same identity
├── MergeError              checkpoints that do not make one model
├── ProcessLostError        another process of those that train together is gone
├── StoreFullError          no space left while saving
├── StoreError              a store at a URL cannot be opened, read or written
├── CorpusError             a corpus cannot be built, found or verified
├── ReferenceModelError     the reference model cannot be loaded or does not fit the documents
└── MeasurementError        a model cannot be measured: its losses are no numbers, its positions end too early
    └── ProbeError          a probe or a task cannot be made at the length asked for, or not with this model
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from workers.spec import CheckpointRef


class WorkerError(Exception):
    """Base of everything that training, merging or evaluating raises on purpose."""


class ModelMismatchError(WorkerError):
    """The model that was built differs from the specification."""


class ModelMissingError(WorkerError):
    """There is no model where one should be."""


class DivergedError(WorkerError):
    """A loss or a gradient is not finite, or the mean loss rose too far; `step` is the update not made, 1-based.

    `best_mean` is the lowest mean loss before, where `loss` is a mean that rose above it. `good_step` is that of the
    last checkpoint before things went wrong; None if there is none.
    """

    def __init__(
        self,
        *,
        step: int,
        loss: float,
        gradient_norm: float | None = None,
        best_mean: float | None = None,
        good_step: int | None = None,
    ) -> None:
        if best_mean is not None:
            what = f"mean loss is {loss:.3f}, after a best of {best_mean:.3f},"
        elif gradient_norm is not None:
            what = f"the gradient's norm is {gradient_norm} (loss {loss})"
        else:
            what = f"loss is {loss}"
        good = "" if good_step is None else f"; the last good checkpoint is that of step {good_step}"
        super().__init__(f"{what} at step {step}: lower the learning rate or check the data{good}")
        self.step = step
        self.loss = loss
        self.gradient_norm = gradient_norm
        self.best_mean = best_mean
        self.good_step = good_step

    def __reduce__(self) -> tuple[Callable[[], DivergedError], tuple[()]]:
        """Keyword-only arguments do not survive the default pickling, and this error crosses processes."""
        arguments = {name: getattr(self, name) for name in ("step", "loss", "gradient_norm", "best_mean", "good_step")}
        return partial(DivergedError, **arguments), ()


class SegmentRunError(WorkerError):
    """A run cannot be what it says: its start is no start of its segment, or its steps to save lie out of reach."""


class CheckpointError(WorkerError):
    """A checkpoint cannot be used: `ref`, where it was recorded somewhere."""

    ref: CheckpointRef | None = None


class CheckpointMissingError(CheckpointError):
    """No complete checkpoint lies at the given place."""


class CheckpointCorruptError(CheckpointError):
    """The files of a checkpoint do not have the digest they should have."""


class CheckpointConflictError(CheckpointError):
    """A valid checkpoint of the same segment and step holds something else, made in another number of processes or on
    another kind of machine."""


class MergeError(WorkerError):
    """The checkpoints given to an observation rule do not make one model."""


class ProcessLostError(WorkerError):
    """Another process of those that train one segment together is gone, or cannot be reached."""


class StoreFullError(WorkerError):
    """The store has no space left; nothing half-written remains."""


class StoreError(WorkerError):
    """A store at a URL cannot be opened, read or written."""


class CorpusError(WorkerError):
    """A corpus cannot be built, found or verified."""


class ReferenceModelError(WorkerError):
    """The reference model cannot be loaded, or cannot score the documents."""


class MeasurementError(WorkerError):
    """A model cannot be measured on these documents."""


class ProbeError(MeasurementError):
    """A probe's prompts cannot be made as asked for, or the model does not show what the probe looks at."""
