"""Real Ray workers: what they report, and what becomes of those that freeze, die or fail."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest

from orchestrator.executor import RayExecutor
from orchestrator.reports import FINAL, Failed, Lost, Progressed, Report, Saved, Stopped, Trained
from tests.workers.tiny_training import segment_of, short_stage
from workers.spec import Execution, Segment, SegmentRun


def _run(segment: Segment, *save_steps: int) -> SegmentRun:
    return SegmentRun(segment=segment, start=None, save_steps=save_steps)


def _trunk(corpus: str, seed: int = 0) -> Segment:
    return segment_of("short_trunk", short_stage(corpus), seed=seed)


def _reports_of(executor: RayExecutor, token: uuid.UUID) -> list[Report]:
    """All reports of an attempt up to its end, settled one by one."""
    seen: list[Report] = []
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        for item in executor.poll(timeout_s=0.1):
            executor.settle(item)
            if item.report.token == token and not isinstance(item.report, Progressed):
                seen.append(item.report)
        if seen and isinstance(seen[-1], FINAL):
            return seen
    raise AssertionError(f"the attempt did not end; it reported {seen}")


def _gone(pid: int) -> bool:
    """Whether the process ended (one that nobody has waited for yet counts as ended)."""
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_worker_reports_each_checkpoint_and_then_the_end(idle_workers: RayExecutor, corpus: str, store: Path) -> None:
    token = uuid.uuid4()
    idle_workers.launch(("worker-1",), token, _run(_trunk(corpus), 3, 6))
    reports = _reports_of(idle_workers, token)
    assert [type(report) for report in reports] == [Saved, Saved, Trained]
    assert [report.checkpoint.ref.step for report in reports if isinstance(report, Saved)] == [3, 6]
    assert all((store / report.checkpoint.path).is_dir() for report in reports if isinstance(report, Saved))
    assert "worker-1" in idle_workers.free()


def test_reports_come_again_until_they_are_settled(idle_workers: RayExecutor, corpus: str) -> None:
    """B100: while nothing can be recorded nothing is lost, and a worker with unrecorded reports takes no new work."""
    token = uuid.uuid4()
    idle_workers.launch(("worker-1",), token, _run(_trunk(corpus), 2))
    deadline_s = time.monotonic() + 60.0
    seen: tuple[Report, ...] = ()
    while len(seen) < 2 and time.monotonic() < deadline_s:
        seen = tuple(i.report for i in idle_workers.poll(timeout_s=0.1) if not isinstance(i.report, Progressed))
    again = tuple(i.report for i in idle_workers.poll(timeout_s=0.0) if not isinstance(i.report, Progressed))
    assert [type(report) for report in seen] == [Saved, Trained]
    assert again == seen
    assert "worker-1" not in idle_workers.free()
    assert _reports_of(idle_workers, token) == list(seen)
    assert "worker-1" in idle_workers.free()


def test_busy_worker_takes_no_second_attempt(idle_workers: RayExecutor, corpus: str) -> None:
    token = uuid.uuid4()
    idle_workers.launch(("worker-1",), token, _run(_trunk(corpus), 2))
    with pytest.raises(ValueError, match="worker-1 is not free"):
        idle_workers.launch(("worker-1",), uuid.uuid4(), _run(_trunk(corpus), 2))
    assert isinstance(_reports_of(idle_workers, token)[-1], Trained)


def test_exception_of_the_work_is_reported_with_its_traceback(idle_workers: RayExecutor) -> None:
    token = uuid.uuid4()
    idle_workers.launch(("worker-1",), token, _run(_trunk("0" * 32), 2))
    (report,) = _reports_of(idle_workers, token)
    assert isinstance(report, Failed)
    assert report.error == "CorpusError"
    assert "0" * 32 in report.message
    assert "open_corpus" in report.traceback


def test_asked_to_stop_a_worker_ends_at_its_next_checkpoint(idle_workers: RayExecutor, corpus: str) -> None:
    token, pid = uuid.uuid4(), idle_workers.pids()["worker-1"]
    steps = tuple(range(1, 2000))
    idle_workers.launch(("worker-1",), token, _run(_trunk(corpus, seed=1), *steps))
    idle_workers.stop(token)
    *saved, last = _reports_of(idle_workers, token)
    assert isinstance(last, Stopped)
    assert len(saved) < len(steps)
    assert idle_workers.pids()["worker-1"] == pid


def _together(segment: Segment, *save_steps: int) -> SegmentRun:
    return SegmentRun(segment=segment, start=None, save_steps=save_steps, execution=Execution(processes=2))


def _all_free(executor: RayExecutor, count: int) -> bool:
    deadline_s = time.monotonic() + 120.0
    while len(executor.free()) < count and time.monotonic() < deadline_s:
        executor.poll(timeout_s=0.1)
    return len(executor.free()) >= count


def test_workers_that_train_together_report_once_and_are_free_together(
    idle_workers: RayExecutor, corpus: str, store: Path
) -> None:
    assert _all_free(idle_workers, 2)
    token, pids = uuid.uuid4(), idle_workers.pids()
    idle_workers.launch(("worker-1", "worker-2"), token, _together(_trunk(corpus, seed=13), 3, 6))
    assert idle_workers.attempts() == (token,)
    reports = _reports_of(idle_workers, token)
    assert [type(report) for report in reports] == [Saved, Saved, Trained]
    assert all((store / report.checkpoint.path).is_dir() for report in reports if isinstance(report, Saved))
    assert _all_free(idle_workers, 2)
    assert idle_workers.pids() == pids
    again = uuid.uuid4()
    idle_workers.launch(("worker-2", "worker-1"), again, _together(_trunk(corpus, seed=14), 2))
    assert isinstance(_reports_of(idle_workers, again)[-1], Trained)


def test_together_they_stop_at_the_same_checkpoint(idle_workers: RayExecutor, corpus: str) -> None:
    assert _all_free(idle_workers, 2)
    token, pids = uuid.uuid4(), idle_workers.pids()
    idle_workers.launch(("worker-1", "worker-2"), token, _together(_trunk(corpus, seed=15), *range(1, 2000)))
    idle_workers.stop(token)
    assert isinstance(_reports_of(idle_workers, token)[-1], Stopped)
    assert _all_free(idle_workers, 2)
    assert idle_workers.pids() == pids


def test_attempt_has_one_end_when_one_of_its_processes_dies(idle_workers: RayExecutor, corpus: str) -> None:
    assert _all_free(idle_workers, 2)
    token, pids = uuid.uuid4(), idle_workers.pids()
    idle_workers.launch(("worker-1", "worker-2"), token, _together(_trunk(corpus, seed=16), 1, 100_000))
    while not any(isinstance(item.report, Saved) for item in idle_workers.poll(timeout_s=0.1)):
        pass
    os.kill(pids["worker-2"], signal.SIGKILL)
    *_, last = _reports_of(idle_workers, token)
    assert isinstance(last, Lost)
    assert "worker-2 died" in last.reason
    assert idle_workers.alive() == 2  # one that is about to take a place counts
    assert _all_free(idle_workers, 2)
    after = idle_workers.pids()
    assert after["worker-1"] == pids["worker-1"]  # it noticed, and is none the worse for it
    assert after["worker-2"] != pids["worker-2"]


def test_frozen_workers_that_train_together_are_killed_after_the_grace_and_replaced(
    idle_workers: RayExecutor, corpus: str
) -> None:
    """B74, B76: workers that answer no more are stopped all the same; their places are taken, for good."""
    assert _all_free(idle_workers, 2)
    token, pids = uuid.uuid4(), idle_workers.pids()
    idle_workers.launch(("worker-1", "worker-2"), token, _together(_trunk(corpus, seed=17), 1, 100_000))
    while not any(isinstance(item.report, Saved) for item in idle_workers.poll(timeout_s=0.1)):
        pass
    os.kill(pids["worker-2"], signal.SIGSTOP)
    idle_workers.stop(token)
    *_, last = _reports_of(idle_workers, token)
    assert last == Stopped(token=token)
    assert _gone(pids["worker-2"])
    assert _all_free(idle_workers, 2)
