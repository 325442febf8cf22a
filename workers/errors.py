"""Errors of the training and measuring code.

WorkerError
├── ModelMismatchError      the built model is not the one asked for (N, RoPE base)
├── DivergedError           the loss became NaN or infinite: the user's failure, with the step
├── CheckpointError
│   ├── CheckpointMissingError
│   └── CheckpointCorruptError   wrong digest, truncated, unreadable
├── StoreFullError          no space left while saving
├── CorpusError             a corpus cannot be built, found or verified
└── ReferenceModelError     the reference model cannot be loaded or does not fit the documents
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of everything that training, merging or evaluating raises on purpose."""


class ModelMismatchError(WorkerError):
    """The model that was built differs from the specification."""


class DivergedError(WorkerError):
    """Training produced a loss that is not a number."""

    def __init__(self, *, step: int, loss: float) -> None:
        super().__init__(f"loss is {loss} at step {step}: lower the learning rate or check the data")
        self.step = step
        self.loss = loss


class CheckpointError(WorkerError):
    """A checkpoint cannot be used."""


class CheckpointMissingError(CheckpointError):
    """No complete checkpoint lies at the given place."""


class CheckpointCorruptError(CheckpointError):
    """The files of a checkpoint do not have the digest they should have."""


class StoreFullError(WorkerError):
    """The store has no space left; nothing half-written remains."""


class CorpusError(WorkerError):
    """A corpus cannot be built, found or verified."""


class ReferenceModelError(WorkerError):
    """The reference model cannot be loaded, or cannot score the documents."""
