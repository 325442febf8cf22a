"""Long-lived workers on Ray. Launch, poll, stop: nothing else of Ray is seen outside, and nothing here is the truth.

Whatever Ray raises about a worker becomes one report, `Lost`; the worker is replaced. No call waits without a limit.

Several workers may train one segment together. The first of them leads: it alone reports. When one of them fails or
dies the others notice it and end as well; those that do not are killed after a grace. The attempt has one end
(`orchestrator.running_attempt`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from orchestrator.ray_cluster import ray_cluster
from orchestrator.ray_worker import Seat, Worker
from orchestrator.reports import FINAL, Lost, Numbered, Progressed, Report, WorkerReport
from orchestrator.running_attempt import RunningAttempt
from workers.probe_spec import ProbeRun
from workers.spec import EvaluationRun, SegmentRun

logger = logging.getLogger("longlaw.executor")

_NEWS_WAIT_S = 0.5
_MAX_RESTART_WAIT_S = 60.0
#: A worker that died so often without a word between is not counted on.
_DEATHS_TO_GIVE_UP = 3


@dataclass(slots=True, kw_only=True)
class _Slot:
    """A worker's place: the actor in it, the attempt it is busy with, and reports that are not settled yet.

    A leader's attempt stays until its end is settled, that of a worker that follows until it has ended.
    """

    name: str
    actor: Any = None
    ready: bool = False
    attempt: RunningAttempt | None = None
    place: Any = None
    start: Any = None
    poll: Any = None
    polled_at_s: float = 0.0
    received: int = 0
    inbox: deque[Report] = field(default_factory=deque)
    progress: Progressed | None = None
    kill_at_s: float | None = None
    deaths: int = 0
    restart_at_s: float = 0.0

    @property
    def at_work(self) -> bool:
        return self.attempt is not None and self.name in self.attempt.at_work


class RayExecutor:
    """Workers that train and evaluate; a context manager that starts Ray and leaves no process behind.

    Args:
        workers: how many processes.
        store: folder or fsspec URL of checkpoints, corpora and references, the same on every node.
        store_cache: where each node mirrors a store that is a URL.
        state_dir: where Ray's token is kept.
        address: HOST:PORT of a running Ray head; None starts a private Ray on this machine.
        niceness: of the workers of a private Ray; above 0 they yield to Postgres, the API and whatever else runs here.
        gpus_per_worker: GPUs that each worker gets for itself.
        silence_limit_s: a worker that does not answer for so long is given up and replaced.
        stop_grace_s: how long a worker may take to stop by its own will.

    Raises:
        RayUnreachableError: on entering, if nobody listens at `address`.
    """

    def __init__(
        self,
        *,
        workers: int,
        store: Path | str,
        state_dir: Path,
        store_cache: Path | None = None,
        address: str | None = None,
        niceness: int = 10,
        gpus_per_worker: float = 0.0,
        silence_limit_s: float = 60.0,
        stop_grace_s: float = 10.0,
    ) -> None:
        self._slots = {f"worker-{index + 1}": _Slot(name=f"worker-{index + 1}") for index in range(workers)}
        self._store, self._store_cache = str(store), str(store_cache or state_dir / "store-cache")
        self._state_dir, self._address = state_dir, address
        self._gpus_per_worker, self._niceness = gpus_per_worker, niceness
        self._silence_limit_s, self._stop_grace_s = silence_limit_s, stop_grace_s
        self._looked_at_s = 0.0
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        self._exits.enter_context(
            ray_cluster(
                workers=len(self._slots), niceness=self._niceness, address=self._address, state_dir=self._state_dir
            )
        )
        self._looked_at_s = time.monotonic()
        for slot in self._slots.values():
            self._hire(slot)
        return self

    def __exit__(self, *_: object) -> None:
        for slot in self._slots.values():
            self._kill(slot)
        self._exits.close()

    def __len__(self) -> int:
        return len(self._slots)

    def free(self) -> tuple[str, ...]:
        """Names of the workers that can take an attempt now."""
        return tuple(slot.name for slot in self._slots.values() if slot.ready and slot.attempt is None)

    def alive(self) -> int:
        """How many workers are at work, free or about to be; the others die again and again, or find no machine."""
        now = time.monotonic()
        begins = self._silence_limit_s
        return sum(
            slot.ready or (slot.deaths < _DEATHS_TO_GIVE_UP and now - slot.polled_at_s < begins)
            for slot in self._slots.values()
        )

    def attempts(self) -> tuple[uuid.UUID, ...]:
        """Tokens of the attempts that are under way, or whose end is not settled yet."""
        running = (slot.attempt for slot in self._slots.values())
        return tuple(dict.fromkeys(attempt.token for attempt in running if attempt is not None))

    def launch(self, workers: Sequence[str], token: uuid.UUID, run: SegmentRun | EvaluationRun | ProbeRun) -> None:
        """Begins `run` on free workers, as many as it asks for, under the attempt's `token`; the first one leads."""
        slots = [self._slots[worker] for worker in workers]
        if busy := [slot.name for slot in slots if not slot.ready or slot.attempt is not None]:
            raise ValueError(f"{', '.join(busy)} is not free")
        attempt = RunningAttempt(token=token, run=run, workers=tuple(workers))
        for slot in slots:
            slot.attempt = attempt
        leader = slots[0]
        if not isinstance(run, SegmentRun):
            leader.start = leader.actor.start_evaluation.remote(token, run)
        elif len(slots) == 1:
            leader.start = leader.actor.start_segment.remote(token, run)
        else:
            leader.place = leader.actor.meeting_place.remote()  # they begin when it is known

    def poll(self, *, timeout_s: float) -> tuple[WorkerReport, ...]:
        """All unsettled reports, oldest first for each worker, after waiting `timeout_s` at most for the first new one.

        The same report comes again until `settle` was called for it.
        """
        self._look_after()
        self._listen(timeout_s)
        reports = []
        for slot in self._slots.values():
            if slot.progress is not None:
                reports.append(WorkerReport(worker=slot.name, report=slot.progress))
                slot.progress = None
            reports += [WorkerReport(worker=slot.name, report=report) for report in slot.inbox]
        return tuple(reports)

    def settle(self, item: WorkerReport) -> None:
        """Forgets a report that has been dealt with; after a final one the worker is free again."""
        slot = self._slots[item.worker]
        if slot.inbox and slot.inbox[0] is item.report:
            slot.inbox.popleft()
            if isinstance(item.report, FINAL):
                slot.attempt = None

    def stop(self, token: uuid.UUID, *, at_checkpoint: bool = False) -> None:
        """Asks the attempt to stop; after the grace time its process is killed. Either way it is reported `Stopped`.

        Args:
            at_checkpoint: it may take as long as it needs to its next checkpoint.
        """
        for slot in self._slots.values():
            if slot.attempt is not None and slot.attempt.token == token:
                slot.attempt.stopping |= not at_checkpoint
                if slot.at_work and slot.kill_at_s is None:
                    if not at_checkpoint:
                        slot.kill_at_s = time.monotonic() + self._stop_grace_s
                    slot.actor.stop.remote(token)  # also to followers: the first process decides for all of them

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that are ready, by name."""
        import ray

        ready = [slot for slot in self._slots.values() if slot.ready]
        return {slot.name: ray.get(slot.actor.pid.remote(), timeout=self._silence_limit_s) for slot in ready}

    def _look_after(self) -> None:
        """Replaces dead workers, and kills those that outlive their grace or fell silent."""
        now = time.monotonic()
        unheard_s = max(0.0, now - self._looked_at_s - self._silence_limit_s / 4)  # for so long nobody listened
        self._looked_at_s = now
        for slot in self._slots.values():
            slot.polled_at_s += unheard_s
        for slot in self._slots.values():
            if slot.actor is None:
                if now >= slot.restart_at_s:
                    self._hire(slot)
            elif slot.kill_at_s is not None and now > slot.kill_at_s:
                self._retire(slot, "it did not end when it was to", made_to=True)
            elif slot.ready and now - slot.polled_at_s > self._silence_limit_s:
                self._retire(slot, f"{slot.name} did not answer for {self._silence_limit_s:.0f} s")

    def _listen(self, timeout_s: float) -> None:
        import ray

        asked = {slot.poll: slot for slot in self._slots.values() if slot.poll is not None}
        asked |= {slot.place: slot for slot in self._slots.values() if slot.place is not None}
        if not asked:
            time.sleep(timeout_s)
            return
        some, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s)
        if some:
            some, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for reference in some:
            slot = asked[reference]
            if slot.poll is reference:  # else it was given up since
                self._hear(slot)
            elif slot.place is reference:
                self._begin_together(slot)

    def _begin_together(self, leader: _Slot) -> None:
        import ray

        place, leader.place, attempt = leader.place, None, leader.attempt
        assert attempt is not None
        assert isinstance(attempt.run, SegmentRun)
        slots = [self._slots[name] for name in attempt.workers]
        try:
            address, port = ray.get(place, timeout=self._silence_limit_s)
        except ray.exceptions.RayError as error:
            self._retire(leader, _reason(leader.name, error))
            return
        if len(attempt.at_work) < len(slots):  # one of them died meanwhile
            for slot in slots:
                if slot.attempt is attempt and slot.at_work:
                    self._end(slot, None)
            return
        for rank, slot in enumerate(slots):
            seat = Seat(rank=rank, processes=len(slots), address=address, port=port)
            slot.start = slot.actor.start_segment.remote(attempt.token, attempt.run, seat)

    def _hear(self, slot: _Slot) -> None:
        import ray

        try:
            if slot.start is not None and ray.wait([slot.start], timeout=0)[0]:
                ray.get(slot.start, timeout=0)
                slot.start = None
            news: tuple[Numbered, ...] = ray.get(slot.poll, timeout=self._silence_limit_s)
        except (ray.exceptions.RayError, RuntimeError) as error:
            self._retire(slot, _reason(slot.name, error))
            return
        slot.poll, slot.ready, slot.deaths = None, True, 0
        for item in news:
            if isinstance(item.report, Progressed):
                slot.progress = item.report
            elif item.number > slot.received:
                slot.received = item.number
                if isinstance(item.report, FINAL):
                    self._end(slot, item.report)
                else:
                    slot.inbox.append(item.report)
        self._ask(slot)

    def _end(self, slot: _Slot, report: Report | None) -> None:
        """A worker is done with its attempt. Its companions have a grace to end where they have nothing left to do;
        with the last of them the whole has ended, which the leader's inbox tells."""
        attempt = slot.attempt
        assert attempt is not None
        attempt.ended(slot.name, report)
        slot.start, slot.kill_at_s = None, None
        if slot.name != attempt.leader:
            slot.attempt = None
        if attempt.over:
            self._slots[attempt.leader].inbox.append(attempt.end())
        elif attempt.ending:
            for companion in (self._slots[name] for name in attempt.at_work):
                if companion.kill_at_s is None:
                    companion.kill_at_s = time.monotonic() + self._stop_grace_s

    def _ask(self, slot: _Slot) -> None:
        slot.poll, slot.polled_at_s = slot.actor.poll.remote(slot.received, _NEWS_WAIT_S), time.monotonic()

    def _hire(self, slot: _Slot) -> None:
        import ray

        actor = ray.remote(Worker).options(
            num_cpus=1,
            num_gpus=self._gpus_per_worker,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=3,  # a poll that waits, beside a start and a stop
        )
        slot.actor, slot.ready, slot.received = actor.remote(self._store, self._store_cache), False, 0
        self._ask(slot)

    def _retire(self, slot: _Slot, reason: str, *, made_to: bool = False) -> None:
        """Kills a worker and has it replaced. What it was at has lost it, unless it was `made_to` end."""
        logger.warning("%s is replaced: %s", slot.name, reason)
        self._kill(slot)
        if slot.at_work and slot.attempt is not None:
            self._end(slot, None if made_to else Lost(token=slot.attempt.token, reason=reason))
        slot.deaths += 1
        wait_s = 0.0 if slot.deaths == 1 else min(_MAX_RESTART_WAIT_S, 2.0**slot.deaths)
        slot.restart_at_s = time.monotonic() + wait_s

    def _kill(self, slot: _Slot) -> None:
        import ray

        if slot.actor is not None:
            ray.kill(slot.actor, no_restart=True)
        slot.actor, slot.place, slot.start, slot.poll = None, None, None, None
        slot.ready, slot.progress = False, None


def _reason(worker: str, error: Exception) -> str:
    """Why a worker is gone, from what Ray says about it."""
    text = str(error).strip()
    if "low on memory" in text or "OutOfMemory" in type(error).__name__:
        return f"{worker} was killed because its machine ran low on memory"
    if "node has died" in text or "node was terminated" in text or "ActorUnavailable" in type(error).__name__:
        return f"{worker} is gone with its machine, or the network to it"
    if "creation task" in text:
        return f"{worker} could not start: {text.splitlines()[-1]}"
    if "SYSTEM_ERROR" in text:
        return f"{worker} died: its process crashed, or was killed (by the kernel for want of memory, or by someone)"
    return f"{worker} is gone ({type(error).__name__}): {text.splitlines()[0] if text else 'no reason given'}"[:500]
