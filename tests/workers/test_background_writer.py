"""Writing beside training: in order, one at a time, waited for at the end."""

from __future__ import annotations

import threading

import pytest

from workers.background_writer import BackgroundWriter
from workers.errors import StoreFullError
from workers.results import Checkpoint
from workers.spec import CheckpointRef


def saved(step: int) -> Checkpoint:
    ref = CheckpointRef(segment="s", step=step)
    return Checkpoint(ref=ref, path="p", digest="d", size_bytes=1, stage_tokens=step, scheduled=True, mean_loss=None)


def test_nothing_is_finished_while_the_write_is_under_way() -> None:
    gate = threading.Event()

    def write() -> Checkpoint:
        gate.wait()
        return saved(1)

    with BackgroundWriter() as writer:
        writer.submit(write)
        assert list(writer.finished()) == []
        with pytest.raises(RuntimeError, match="not taken"):
            writer.submit(lambda: saved(2))
        gate.set()
        assert list(writer.finished(wait=True)) == [saved(1)]
        assert list(writer.finished(wait=True)) == []


def test_error_of_a_write_reaches_whoever_asks() -> None:
    def write() -> Checkpoint:
        raise StoreFullError("full")

    with BackgroundWriter() as writer:
        writer.submit(write)
        with pytest.raises(StoreFullError, match="full"):
            list(writer.finished(wait=True))


def test_leaving_waits_for_the_write_under_way() -> None:
    gate, ended = threading.Event(), threading.Event()

    def write() -> Checkpoint:
        gate.wait()
        ended.set()
        return saved(1)

    with BackgroundWriter() as writer:
        writer.submit(write)
        gate.set()
    assert ended.is_set()
