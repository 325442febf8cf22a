"""Whose failure it is."""

from __future__ import annotations

import uuid

import pytest

from database.attempts import FailureKind
from orchestrator.failures import failure_of
from orchestrator.reports import Failed, Lost

TOKEN = uuid.uuid4()


@pytest.mark.parametrize(
    ("error", "kind", "hopeless"),
    [
        ("DivergedError", "user", True),
        ("ModelMismatchError", "user", True),
        ("KeyError", "user", False),
        ("CorpusError", "user", False),
        ("ProbeError", "user", True),
        ("CheckpointCorruptError", "infrastructure", False),
        ("CheckpointConflictError", "infrastructure", False),
        ("ProcessLostError", "infrastructure", False),
        ("MemoryError", "infrastructure", False),
        ("OSError", "infrastructure", False),
        ("ConnectionResetError", "infrastructure", False),
        ("FileNotFoundError", "infrastructure", False),
        ("print", "user", False),
    ],
)
def test_exceptions_are_classed(error: str, kind: FailureKind, hopeless: bool) -> None:
    failure = failure_of(Failed(token=TOKEN, error=error, message="so it is", traceback=""))
    assert (failure.kind, failure.hopeless, failure.lost) == (kind, hopeless, False)
    assert failure.reason.startswith(f"{error}: so it is")


def test_unreadable_checkpoint_comes_with_a_way_out() -> None:
    failure = failure_of(Failed(token=TOKEN, error="CheckpointMissingError", message="it is gone", traceback=""))
    assert failure.reason == (
        "CheckpointMissingError: it is gone; where it stays so, `longlaw grid retry` trains it again"
    )


def test_full_store_waits_at_the_infrastructures_expense() -> None:
    """B29."""
    failure = failure_of(Failed(token=TOKEN, error="StoreFullError", message="/store", traceback=""))
    assert failure.kind == "infrastructure"
    assert failure.reason == "no space left in the store: free some (/store)"
    assert failure.min_backoff_s >= 60.0


def test_store_that_cannot_be_reached_is_waited_for_at_the_infrastructures_expense() -> None:
    failure = failure_of(Failed(token=TOKEN, error="StoreError", message="s3://runs cannot be read", traceback=""))
    assert (failure.kind, failure.hopeless) == ("infrastructure", False)
    assert failure.min_backoff_s >= 60.0


def test_lost_worker_is_the_infrastructures() -> None:
    failure = failure_of(Lost(token=TOKEN, reason="worker-1 died"))
    assert (failure.kind, failure.lost, failure.reason) == ("infrastructure", True, "worker-1 died")
