"""The worker itself, without Ray: its spool, and calls that overtake each other."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from orchestrator.ray_worker import Worker
from orchestrator.reports import FINAL, Numbered, Progressed, Saved, Stopped, Trained
from tests.workers.tiny_training import segment_of, short_stage
from workers.spec import SegmentRun


@pytest.fixture
def worker(store: Path) -> Worker:
    return Worker(str(store), die_with_parent=False)


def _run(corpus: str, *save_steps: int, seed: int = 0) -> SegmentRun:
    segment = segment_of("short_trunk", short_stage(corpus), seed=seed)
    return SegmentRun(segment=segment, start=None, save_steps=save_steps)


def _spool(worker: Worker, received: int = 0) -> tuple[Numbered, ...]:
    """All reports after `received`, once the attempt is over."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        spool = tuple(item for item in worker.poll(received, 0.1) if not isinstance(item.report, Progressed))
        if spool and isinstance(spool[-1].report, FINAL):
            return spool
        time.sleep(0.01)
    raise AssertionError("the attempt did not end")


def test_reports_stay_in_the_spool_until_they_are_received(worker: Worker, corpus: str) -> None:
    worker.start_segment(uuid.uuid4(), _run(corpus, 1, 2))
    spool = _spool(worker)
    assert [item.number for item in spool] == [1, 2, 3]
    assert [type(item.report) for item in spool] == [Saved, Saved, Trained]
    assert worker.poll(0, 0.0) == spool
    assert worker.poll(2, 0.0) == spool[2:]
    assert worker.poll(3, 0.0) == ()


def test_numbers_go_on_from_one_attempt_to_the_next(worker: Worker, corpus: str) -> None:
    worker.start_segment(uuid.uuid4(), _run(corpus, 1))
    assert [item.number for item in _spool(worker)] == [1, 2]
    worker.start_segment(uuid.uuid4(), _run(corpus, 1))
    assert [item.number for item in _spool(worker, received=2)] == [3, 4]


def test_stop_that_overtakes_the_start_is_obeyed(worker: Worker, corpus: str) -> None:
    token = uuid.uuid4()
    worker.stop(token)
    worker.start_segment(token, _run(corpus, 1, 2, 3, seed=5))
    assert [type(item.report) for item in _spool(worker)] == [Saved, Stopped]


def test_stop_of_another_attempt_is_ignored(worker: Worker, corpus: str) -> None:
    worker.stop(uuid.uuid4())
    worker.start_segment(uuid.uuid4(), _run(corpus, 1, 2))
    assert isinstance(_spool(worker)[-1].report, Trained)


def test_busy_worker_refuses_a_second_attempt(worker: Worker, corpus: str) -> None:
    token = uuid.uuid4()
    worker.start_segment(token, _run(corpus, *range(1, 500), seed=6))
    with pytest.raises(RuntimeError, match=str(token)):
        worker.start_segment(uuid.uuid4(), _run(corpus, 1))
    worker.stop(token)
    assert isinstance(_spool(worker)[-1].report, Stopped)
