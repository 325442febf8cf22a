"""What the ends of several workers make of an attempt."""

from __future__ import annotations

import itertools
import uuid

import pytest

from orchestrator.reports import Failed, Lost, Report, Stopped, Trained
from orchestrator.running_attempt import RunningAttempt
from tests.workers.tiny_training import segment_of, short_stage
from workers.spec import SegmentRun

TOKEN = uuid.uuid4()
RUN = SegmentRun(segment=segment_of("short_trunk", short_stage("0" * 32)), start=None, save_steps=(1,))
LEFT_ALONE = Failed(token=TOKEN, error="ProcessLostError", message="one of 3 is gone", traceback="")
NO_MEMORY = Failed(token=TOKEN, error="MemoryError", message="", traceback="")
DIED = Lost(token=TOKEN, reason="worker-3 died")


def attempt() -> RunningAttempt:
    return RunningAttempt(token=TOKEN, run=RUN, workers=("worker-1", "worker-2", "worker-3"))


def end_of(running: RunningAttempt, ends: dict[str, Report | None]) -> Report:
    for worker, report in ends.items():
        assert not running.over
        running.ended(worker, report)
    assert running.over
    return running.end()


@pytest.mark.parametrize(
    ("ends", "whole"),
    [
        ((LEFT_ALONE, NO_MEMORY, LEFT_ALONE), NO_MEMORY),
        ((LEFT_ALONE, LEFT_ALONE, DIED), DIED),
        ((NO_MEMORY, LEFT_ALONE, DIED), DIED),
        ((LEFT_ALONE, None, None), LEFT_ALONE),
        ((Trained(token=TOKEN), Trained(token=TOKEN), DIED), Trained(token=TOKEN)),
        ((Stopped(token=TOKEN), Stopped(token=TOKEN), None), Stopped(token=TOKEN)),
        ((DIED, Trained(token=TOKEN), Trained(token=TOKEN)), DIED),
    ],
)
def test_end_is_the_one_that_tells_most_in_whatever_order_it_is_heard(
    ends: tuple[Report | None, ...], whole: Report
) -> None:
    for order in itertools.permutations(zip(("worker-1", "worker-2", "worker-3"), ends, strict=True)):
        assert end_of(attempt(), dict(order)) == whole


def test_success_of_one_that_follows_ends_nothing() -> None:
    running = attempt()
    running.ended("worker-2", Trained(token=TOKEN))
    assert not running.ending
    running.ended("worker-1", Trained(token=TOKEN))
    assert running.ending
    assert not running.over


@pytest.mark.parametrize("broken", [LEFT_ALONE, DIED, None])
def test_what_breaks_while_it_is_to_stop_has_stopped(broken: Report | None) -> None:
    running = attempt()
    running.stopping = True
    assert end_of(running, {"worker-1": LEFT_ALONE, "worker-2": broken, "worker-3": None}) == Stopped(token=TOKEN)


def test_exception_while_it_is_to_stop_is_told() -> None:
    running = attempt()
    running.stopping = True
    assert end_of(running, {"worker-1": LEFT_ALONE, "worker-2": NO_MEMORY, "worker-3": None}) == NO_MEMORY
