"""Errors of the training and measuring code.

WorkerError
├── ModelMismatchError      the built model is not the one asked for (N, RoPE base, digest)
├── ModelMissingError       a folder holds no model that could be used
├── DivergedError           the loss or its gradient became NaN or infinite: the user's failure, with the step
├── SegmentRunError         start, steps to save and segment of a run contradict each other
├── CheckpointError
│   ├── CheckpointMissingError
│   ├── CheckpointCorruptError   wrong digest, truncated, unreadable
│   └── CheckpointConflictError  a valid checkpoint with another content has the same identity
├── MergeError              checkpoints that do not make one model
├── StoreFullError          no space left while saving
├── StoreError              a store at a URL cannot be opened, read or written
├── CorpusError             a corpus cannot be built, found or verified
├── ReferenceModelError     the reference model cannot be loaded or does not fit the documents
└── ProbeError              a probe or a task cannot be made at the length asked for, or not with this model
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class WorkerError(Exception):
    """Base of everything that training, merging or evaluating raises on purpose."""


class ModelMismatchError(WorkerError):
    """The model that was built differs from the specification."""


class ModelMissingError(WorkerError):
    """There is no model where one should be."""


class DivergedError(WorkerError):
    """Training produced a loss or a gradient that is not finite; `step` is the update not made, 1-based."""

    def __init__(self, *, step: int, loss: float, gradient_norm: float | None = None) -> None:
        what = f"loss is {loss}" if gradient_norm is None else f"the gradient's norm is {gradient_norm} (loss {loss})"
        super().__init__(f"{what} at step {step}: lower the learning rate or check the data")
        self.step = step
        self.loss = loss
        self.gradient_norm = gradient_norm

    def __reduce__(self) -> tuple[Callable[[], DivergedError], tuple[()]]:
        """Keyword-only arguments do not survive the default pickling, and this error crosses processes."""
        return partial(DivergedError, step=self.step, loss=self.loss, gradient_norm=self.gradient_norm), ()


class SegmentRunError(WorkerError):
    """A run cannot be what it says: its start is no start of its segment, or its steps to save lie out of reach."""


class CheckpointError(WorkerError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError):
    """No complete checkpoint lies at the given place."""


class CheckpointCorruptError(CheckpointError):
    """The files of a checkpoint do not have the digest they should have."""


class CheckpointConflictError(CheckpointError):
    """A valid checkpoint of the same segment and step holds something else: training was not reproducible."""


class MergeError(WorkerError):
    """The checkpoints given to an observation rule do not make one model."""


class StoreFullError(WorkerError):
    """The store has no space left; nothing half-written remains."""


class StoreError(WorkerError):
    """A store at a URL cannot be opened, read or written."""


class CorpusError(WorkerError):
    """A corpus cannot be built, found or verified."""


class ReferenceModelError(WorkerError):
    """The reference model cannot be loaded, or cannot score the documents."""


class ProbeError(WorkerError):
    """A probe's prompts cannot be made as asked for, or the model does not show what the probe looks at."""
