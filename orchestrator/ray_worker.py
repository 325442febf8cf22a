"""What runs inside a Ray actor: one long-lived process that trains and evaluates, one attempt at a time.

The work is done by an inner thread; every method returns at once (`poll` waits a moment for news), so the actor answers
while it trains. Reports are spooled until the other side says that it has them: a slow scheduler loses nothing.
Knows nothing of Ray: the executor turns the class into an actor.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.reports import Failed, Measured, Numbered, Progressed, Report, Saved, Stopped, Trained
from workers.mirror import open_store
from workers.probe_spec import ProbeRun
from workers.results import TrainProgress, probed
from workers.spec import EvaluationRun, SegmentRun

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_TRACEBACK_CHARS = 4_000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's place among the `processes` that train one segment together, and where the first of them listens."""

    rank: int
    processes: int
    address: str
    port: int


class Worker:
    """One process's worth of work.

    Args:
        store: folder or fsspec URL of checkpoints, corpora and references.
        store_cache: where a store at a URL is mirrored on this machine.
        threads: torch's threads; one per process is fastest where cores are shared.
        die_with_parent: end with the raylet (Linux), so that no orphan trains on when a node's Ray dies.
    """

    def __init__(
        self, store: str, store_cache: str | None = None, *, threads: int = 1, die_with_parent: bool = True
    ) -> None:
        if die_with_parent and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Imported here and once: seconds of import would otherwise be paid by the first attempt. A seventh of
        # them would go into looking for garbage, of which imports make none.
        gc.disable()
        import torch

        import workers.longppl
        import workers.train  # noqa: F401

        gc.freeze()
        gc.enable()
        torch.set_num_threads(threads)
        self._store = open_store(store, cache=Path(store_cache or tempfile.gettempdir()))
        self._news = threading.Condition()
        self._spool: list[Numbered] = []
        self._number = 0
        self._progress: Progressed | None = None
        self._token: uuid.UUID | None = None
        self._unwanted: uuid.UUID | None = None
        self._place: TCPStore | None = None

    def pid(self) -> int:
        return os.getpid()

    def meeting_place(self) -> tuple[str, int]:
        """Listens for the other processes of a segment, for the next one that this process leads; returns where."""
        import ray

        from workers.processes import open_meeting_place

        self._place = open_meeting_place()
        address: str = ray.util.get_node_ip_address()
        return address, self._place.port

    def start_segment(self, token: uuid.UUID, run: SegmentRun, seat: Seat | None = None) -> None:
        """Begins to train `run`, alone or in a `seat`; raises RuntimeError while another attempt is under way."""
        self._start(token, lambda: self._train(token, run) if seat is None else self._train_together(token, run, seat))

    def start_evaluation(self, token: uuid.UUID, run: EvaluationRun | ProbeRun) -> None:
        """Begins to measure or probe `run`; raises RuntimeError while another attempt is under way."""
        self._start(token, lambda: self._evaluate(token, run))

    def poll(self, received: int, wait_s: float) -> tuple[Numbered, ...]:
        """Reports after number `received`, oldest first, at once if there are any, else after `wait_s` at most.

        Drops those up to `received`. Progress comes with number 0: it is repeated by the next one and never spooled.
        """
        with self._news:
            self._spool = [item for item in self._spool if item.number > received]
            self._news.wait_for(lambda: bool(self._spool), timeout=wait_s)
            progress, self._progress = self._progress, None
            head = () if progress is None else (Numbered(number=0, report=progress),)
            return (*head, *self._spool)

    def stop(self, token: uuid.UUID) -> None:
        """Asks the attempt to end at its next checkpoint, also if it is yet to begin: calls may overtake each other."""
        self._unwanted = token

    def _start(self, token: uuid.UUID, work: Callable[[], Report]) -> None:
        with self._news:
            if self._token is not None:
                raise RuntimeError(f"the worker is busy with attempt {self._token}")
            self._token = token
        threading.Thread(target=self._do, args=(token, work), daemon=True, name="work").start()

    def _do(self, token: uuid.UUID, work: Callable[[], Report]) -> None:
        try:
            report = work()
        except BaseException as error:  # the thread must not end without a word
            report = Failed(
                token=token,
                error=_name(error),
                message=str(error),
                traceback="".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
                checkpoint=getattr(error, "ref", None),
            )
        with self._news:
            self._token = None
            self._progress = None
            self._tell(report)

    def _tell(self, report: Report) -> None:
        with self._news:
            self._number += 1
            self._spool.append(Numbered(number=self._number, report=report))
            self._news.notify_all()

    def _train_together(self, token: uuid.UUID, run: SegmentRun, seat: Seat) -> Report:
        from workers.processes import joined

        place = None
        if seat.rank == 0:
            place, self._place = self._place, None
        with joined(rank=seat.rank, processes=seat.processes, address=seat.address, port=seat.port, place=place):
            return self._train(token, run, quiet=seat.rank > 0)

    def _train(self, token: uuid.UUID, run: SegmentRun, *, quiet: bool = False) -> Report:
        """Trains; of processes that train together, all but the first are `quiet` about checkpoints and progress."""
        from workers.train import train

        def on_progress(progress: TrainProgress) -> None:
            self._progress = Progressed(token=token, progress=progress)

        reached = 0
        for checkpoint in train(
            run,
            store=self._store,
            on_progress=None if quiet else on_progress,
            should_stop=lambda: self._unwanted == token,
        ):
            reached = checkpoint.ref.step
            if not quiet:
                self._tell(Saved(token=token, checkpoint=checkpoint))
        return Trained(token=token) if reached == run.save_steps[-1] else Stopped(token=token)

    def _evaluate(self, token: uuid.UUID, run: EvaluationRun | ProbeRun) -> Report:
        if isinstance(run, ProbeRun):
            from workers.probes import evaluate_probes

            return Measured(token=token, evaluation=probed(evaluate_probes(run, store=self._store)))
        from workers.longppl import evaluate

        return Measured(token=token, evaluation=evaluate(run, store=self._store))


def _name(error: BaseException) -> str:
    """The error's class; a full disk is StoreFullError, whoever noticed it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "StoreFullError"
    return type(error).__name__
