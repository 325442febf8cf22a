"""What tests run in processes of their own, which they kill. A fork server imports torch once for all of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from tests.workers.tiny_training import trained
from workers import checkpoint
from workers.errors import StoreFullError, WorkerError
from workers.processes import joined
from workers.spec import Segment, SegmentRun, StoredCheckpoint
from workers.train import train

_NEW_NAMESPACES = 0x0002_0000 | 0x1000_0000  # CLONE_NEWNS | CLONE_NEWUSER
NOT_PERMITTED = 77


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.workers.child_processes"])
    return context


def write_for_ever(store: Path, segment: Segment) -> None:
    """Saves one checkpoint after another until it is killed."""
    torch.set_num_threads(1)
    model, optimizer = trained()
    step = 0
    while True:
        step += 1
        checkpoint.write(store, segment, step, model=model, optimizers=(optimizer,))


def train_run(run: SegmentRun, store: Path) -> None:
    torch.set_num_threads(1)
    for _ in train(run, store=store):
        pass


def train_together(run: SegmentRun, store: Path, rank: int, port: int, results: SimpleQueue[Any]) -> None:
    """Trains as one of the run's processes and puts (rank, checkpoints or error)."""
    torch.set_num_threads(1)
    try:
        with joined(rank=rank, processes=run.execution.processes, address="127.0.0.1", port=port):
            found = list(train(run, store=store))
    except WorkerError as error:
        results.put((rank, error))
    else:
        results.put((rank, found))


def fill_small_store(store: Path, segment: Segment) -> None:
    """Mounts 400 kB at `store`, saves until they are full, makes space, saves again; exits with `NOT_PERMITTED` where
    an ordinary process may not mount."""
    torch.set_num_threads(1)
    _mount_small(store)
    ballast = store / "ballast"
    ballast.write_bytes(bytes(100_000))
    model, optimizer = trained()
    folder = store / "checkpoints" / segment.id
    saved: list[StoredCheckpoint] = []
    while True:
        step = len(saved) + 1
        try:
            saved.append(checkpoint.write(store, segment, step, model=model, optimizers=(optimizer,))[0])
        except StoreFullError:
            break
    assert saved
    assert sorted(path.name for path in folder.iterdir()) == [f"{stored.ref.step:012d}" for stored in saved]
    for stored in saved:
        checkpoint.verify(store, stored)
    ballast.unlink()
    checkpoint.verify(store, checkpoint.write(store, segment, step, model=model, optimizers=(optimizer,))[0])


def _mount_small(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACES):
        raise SystemExit(NOT_PERMITTED)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=400k"):
        raise SystemExit(NOT_PERMITTED)
