"""Several processes train what one would: gloo on this machine, replicas and shards."""

from __future__ import annotations

import dataclasses
import errno
import json
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from tests.workers.child_processes import fork_server, train_together
from tests.workers.tiny_training import SHAPE, segment_of, short_stage, tiny_corpus, trained
from workers import checkpoint, processes
from workers.checkpoint_content import capture
from workers.errors import DivergedError, ProcessLostError, SegmentRunError, StoreError, StoreFullError
from workers.processes import open_meeting_place
from workers.results import Checkpoint
from workers.sharded_moments import FOLDER, complete
from workers.spec import CheckpointRef, Execution, Muon, Segment, SegmentRun, ShortStage, StoredCheckpoint
from workers.train import train

STEPS = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def trunk(store: Path) -> Segment:
    stage = dataclasses.replace(short_stage(tiny_corpus(store)), batch_sequences=8)
    return segment_of("short_trunk", stage, shape=dataclasses.replace(SHAPE, layers=2))


@pytest.fixture(scope="module")
def alone(store: Path, trunk: Segment, tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """What one process gets that takes every batch as a whole."""
    return list(train(run_of(trunk), store=elsewhere(store, tmp_path_factory.mktemp("alone"))))


def elsewhere(store: Path, other: Path) -> Path:
    (other / "corpora").symlink_to(store / "corpora")
    return other


def run_of(segment: Segment, start: Checkpoint | None = None, **execution: Any) -> SegmentRun:
    return SegmentRun(
        segment=segment,
        start=None if start is None else StoredCheckpoint(ref=start.ref, path=start.path, digest=start.digest),
        save_steps=(STEPS // 2, STEPS) if start is None else (STEPS,),
        execution=Execution(**execution),
    )


@contextmanager
def started(run: SegmentRun, store: Path) -> Iterator[tuple[list[Any], Any]]:
    """The processes of the run, by rank, and the queue of what each ends with."""
    context, place = fork_server(), open_meeting_place()
    results = context.SimpleQueue()
    children = [
        context.Process(target=train_together, args=(run, store, rank, place.port, results))
        for rank in range(run.execution.processes)
    ]
    for child in children:
        child.start()
    yield children, results
    for child in children:
        child.join()


def together(run: SegmentRun, store: Path) -> dict[int, Any]:
    """What each process of the run ended with, by rank."""
    with started(run, store) as (children, results):
        ends = dict(results.get() for _ in children)
    assert {child.exitcode for child in children} == {0}
    return ends


def losses_of(found: list[Checkpoint]) -> list[float]:
    return [point.loss for one in found for point in one.health]


@pytest.mark.parametrize("execution", [{}, {"micro_batch_tokens": 32}, {"sharding": "shard"}])
def test_two_processes_train_what_one_does(
    store: Path, trunk: Segment, alone: list[Checkpoint], tmp_path: Path, execution: dict[str, Any]
) -> None:
    """B11, B17: tokens and rates are those of the segment, losses are pooled, every process gets the checkpoints."""
    home = elsewhere(store, tmp_path)
    ends = together(run_of(trunk, processes=2, **execution), home)
    assert ends[0] == ends[1]
    found = ends[0]
    assert losses_of(found) == pytest.approx(losses_of(alone), rel=1e-5)
    for ours, theirs in zip(found, alone, strict=True):
        assert (ours.ref, ours.stage_tokens) == (theirs.ref, theirs.stage_tokens)
        assert ours.mean_loss == pytest.approx(theirs.mean_loss, rel=1e-5)
        assert [point.learning_rate for point in ours.health] == [point.learning_rate for point in theirs.health]
    state = json.loads((home / found[-1].path / checkpoint.STATE).read_text())
    assert state["next_sequence"] == 8 * STEPS
    parts = sorted(path.name for path in (home / found[-1].path / "optimizer").glob("*"))
    assert len(parts) == (2 if execution.get("sharding") == "shard" else 0)
    (resumed,) = train(run_of(trunk, start=found[0]), store=home_with(store, home, found[0], tmp_path / "one"))
    assert losses_of([resumed]) == pytest.approx(losses_of(alone)[STEPS // 2 :], rel=1e-5)


def home_with(store: Path, home: Path, found: Checkpoint, other: Path) -> Path:
    """Another store that holds one checkpoint of `home`."""
    other.mkdir()
    elsewhere(store, other)
    (other / found.path).parent.mkdir(parents=True)
    (other / found.path).symlink_to(home / found.path)
    return other


def test_shards_keep_documents_apart_as_the_whole_does(store: Path, trunk: Segment, tmp_path: Path) -> None:
    data = dataclasses.replace(trunk.stage.data, packing="documents")
    segment = dataclasses.replace(trunk, stage=dataclasses.replace(trunk.stage, data=data))
    (tmp_path / "one").mkdir()
    found = list(train(run_of(segment), store=elsewhere(store, tmp_path / "one")))
    (tmp_path / "two").mkdir()
    run = run_of(segment, processes=2, sharding="shard", micro_batch_tokens=64, recompute_activations=True)
    ends = together(run, elsewhere(store, tmp_path / "two"))
    assert losses_of(ends[0]) == pytest.approx(losses_of(found), rel=1e-5)


def test_one_process_with_four_micro_batches_trains_the_same(
    store: Path, trunk: Segment, alone: list[Checkpoint], tmp_path: Path
) -> None:
    found = list(train(run_of(trunk, micro_batch_tokens=64), store=elsewhere(store, tmp_path)))
    assert losses_of(found) == pytest.approx(losses_of(alone), rel=1e-5)


def test_shards_move_by_muon_as_the_whole_does_and_resume_from_its_checkpoint(
    store: Path, trunk: Segment, tmp_path: Path
) -> None:
    segment = dataclasses.replace(trunk, stage=dataclasses.replace(trunk.stage, optimizer=Muon(rate_ratio=1.0)))
    home = elsewhere(store, tmp_path)
    half, end = train(run_of(segment), store=home)
    other = home_with(store, home, half, tmp_path / "shards")
    shards = Execution(processes=2, sharding="shard", recompute_activations=True, micro_batch_tokens=64)
    run = dataclasses.replace(run_of(segment, start=half), execution=shards)
    ends = together(run, other)
    assert losses_of(ends[0]) == pytest.approx(losses_of([end]), rel=1e-4)


def test_shards_resumed_from_shards_are_bit_identical(store: Path, trunk: Segment, tmp_path: Path) -> None:
    """B1: the parts come back to the processes they were of; another number of processes shares them out anew."""
    home = elsewhere(store, tmp_path)
    shards: dict[str, Any] = {"processes": 2, "sharding": "shard"}
    half, end = together(run_of(trunk, **shards), home)[0]
    again = together(run_of(trunk, start=half, **shards), home_with(store, home, half, tmp_path / "again"))
    assert [found.digest for found in again[0]] == [end.digest]


def test_what_one_process_cannot_do_is_raised_in_all(store: Path, trunk: Segment, tmp_path: Path) -> None:
    assert isinstance(trunk.stage, ShortStage)
    wild = dataclasses.replace(trunk, stage=dataclasses.replace(trunk.stage, peak_rate=1e30, warmup_steps=0))
    ends = together(run_of(wild, processes=2), elsewhere(store, tmp_path))
    assert {type(end) for end in ends.values()} == {DivergedError}


def test_batch_that_cannot_be_shared_evenly_is_refused(store: Path, trunk: Segment, tmp_path: Path) -> None:
    odd = dataclasses.replace(trunk, stage=dataclasses.replace(trunk.stage, batch_sequences=3))
    ends = together(run_of(odd, processes=2), elsewhere(store, tmp_path))
    for end in ends.values():
        assert isinstance(end, SegmentRunError)
        assert "cannot be shared evenly" in str(end)


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_whose_companion_is_killed_says_that_it_is_gone(
    store: Path, trunk: Segment, tmp_path: Path, sharding: str
) -> None:
    """Else its own error would pass for a fault of the recipe."""
    run = dataclasses.replace(run_of(trunk, processes=2, sharding=sharding), save_steps=(1, 100_000))
    place = elsewhere(store, tmp_path)
    with started(run, place) as ((_, second), results):
        while not (place / checkpoint.relative_path(CheckpointRef(segment=trunk.id, step=1))).is_dir():
            assert second.is_alive()
            time.sleep(0.01)
        second.kill()
        rank, error = results.get()
    assert rank == 0
    assert isinstance(error, ProcessLostError)


def test_process_that_does_not_come_is_named_and_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MEETING_PATIENCE", timedelta(seconds=0.3))
    place = processes.open_meeting_place()
    with (
        pytest.raises(ProcessLostError, match="process 1 of 2 did not come"),
        processes.joined(rank=0, processes=2, address="localhost", port=place.port, place=place),
    ):
        pass


def test_meeting_place_that_is_gone_is_a_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MEETING_PATIENCE", timedelta(seconds=0.3))
    place = processes.open_meeting_place()
    port = place.port
    del place
    with (
        pytest.raises(ProcessLostError, match="unreachable"),
        processes.joined(rank=1, processes=2, address="localhost", port=port),
    ):
        pass


def test_failure_holds_no_model_when_the_processes_part() -> None:
    """Else DDP would be the last to hold gloo's threads, and could wait for them for ever."""
    held: list[weakref.ref[nn.Module]] = []

    def fail() -> None:
        replica = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        held.append(weakref.ref(replica))
        raise KeyError("spread")

    place = processes.open_meeting_place()
    with (
        pytest.raises(KeyError, match="spread") as failure,
        processes.joined(rank=0, processes=1, address="localhost", port=place.port, place=place),
    ):
        fail()
    assert held[0]() is None
    assert failure.traceback[-1].name == "fail"


def test_parts_that_another_process_wrote_elsewhere_are_missed(tmp_path: Path) -> None:
    """A checkpoint without them would pass for a whole one."""
    (tmp_path / FOLDER).mkdir()
    save_file({"weight.exp_avg": torch.zeros(3)}, tmp_path / FOLDER / "shard-00001.safetensors", {"format": "pt"})
    whole = TensorStorageMetadata(TensorProperties(), torch.Size((5,)), [])
    written: Future[Any] = Future()
    written.set_result(Metadata({"weight.exp_avg": whole}))
    with pytest.raises(StoreError, match="2 of the optimizer's moments are not in"):
        complete(tmp_path, written)


def test_disk_that_is_full_in_another_process_is_a_full_store_and_leaves_nothing(tmp_path: Path) -> None:
    segment, full = segment_of("short_trunk", short_stage("0" * 32)), OSError(errno.ENOSPC, "No space left on device")
    parts: Future[Any] = Future()
    parts.set_exception(CheckpointException("write", {1: (full, None)}))  # type: ignore[dict-item]
    building = checkpoint.begin(tmp_path, segment, 1)
    model, optimizer = trained()
    with pytest.raises(StoreFullError):
        checkpoint.finish(tmp_path, segment, 1, building, capture(model, (optimizer,)), parts=parts)
    assert list(building.parent.iterdir()) == []
