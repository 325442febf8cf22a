"""Errors of the workers cross process borders."""

from __future__ import annotations

import pickle

import pytest

from workers.errors import DivergedError, WorkerError


def subclasses(error: type[WorkerError]) -> list[type[WorkerError]]:
    return [error, *(deeper for child in error.__subclasses__() for deeper in subclasses(child))]


@pytest.mark.parametrize("error", [error for error in subclasses(WorkerError) if error is not DivergedError])
def test_an_error_arrives_with_its_message(error: type[WorkerError]) -> None:
    arrived = pickle.loads(pickle.dumps(error("what to mend")))
    assert type(arrived) is error
    assert str(arrived) == "what to mend"


def test_divergence_arrives_with_its_step() -> None:
    arrived = pickle.loads(pickle.dumps(DivergedError(step=7, loss=2.5, gradient_norm=float("inf"))))
    assert isinstance(arrived, DivergedError)
    assert (arrived.step, arrived.loss, arrived.gradient_norm) == (7, 2.5, float("inf"))
    assert "at step 7" in str(arrived)
