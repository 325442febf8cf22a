"""The scheduler: one process that leads, keeps every worker busy, and writes down what they report.

`python -m orchestrator.scheduler` runs it. It may be killed at any time: what is legal to do next follows from Postgres
and the checkpoint store alone. Others stand by and take over when the leader's database session ends.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from database import attempts, fits, leading, retention, work
from database.attempts import Failure, RetryPolicy
from database.cluster import running_url
from database.engine import create_engine, session_factory
from database.errors import DatabaseError, DatabaseUnavailableError
from database.migrate import check_at_head
from database.observations import record_observations
from database.settings import Settings
from orchestrator.errors import OrchestratorError
from orchestrator.executor import RayExecutor
from orchestrator.failures import UNREADABLE, failure_of
from orchestrator.refit import FitProcess
from orchestrator.reports import FINAL, Failed, Lost, Measured, Progressed, Saved, Stopped, Trained, WorkerReport
from orchestrator.scheduler_settings import SchedulerSettings
from workers import mirror
from workers.errors import CheckpointConflictError, StoreError
from workers.leftovers import remove_unfinished, whole_checkpoints
from workers.probe_spec import ProbeRun
from workers.results import TrainProgress
from workers.spec import CheckpointRef, EvaluationRun, SegmentRun

logger = logging.getLogger("longlaw.scheduler")

_NO_DATABASE = (OperationalError, InterfaceError, PoolTimeoutError)
_MAX_DATABASE_WAIT_S = 10.0
#: Added to the grace of the workers before a scheduler that stops gives up on what it cannot record.
_LAST_REPORTS_S = 5.0
#: A process that began this much after a scheduler registered is another one with the same number.
_CLOCK_TOLERANCE_S = 5.0


class Executor(Protocol):
    """What the scheduler asks of whoever runs the work; `orchestrator.executor` is the one there is."""

    def __len__(self) -> int: ...
    def free(self) -> tuple[str, ...]: ...
    def alive(self) -> int: ...
    def attempts(self) -> tuple[uuid.UUID, ...]: ...
    def launch(self, workers: Sequence[str], token: uuid.UUID, run: SegmentRun | EvaluationRun | ProbeRun) -> None: ...
    def poll(self, *, timeout_s: float) -> tuple[WorkerReport, ...]: ...
    def settle(self, item: WorkerReport) -> None: ...
    def stop(self, token: uuid.UUID, *, at_checkpoint: bool = False) -> None: ...


class Scheduler:
    """The loop. `run` returns after `stop` was called, with every attempt recorded or back in the queue.

    Args:
        engine: the results database.
        executor: the workers.
        store: folder of the checkpoints; the scheduler alone deletes them.
        settings: intervals and budgets.
        fits: looks after re-fits of the law; None leaves them alone.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        *,
        store: Path,
        settings: SchedulerSettings,
        fits: FitProcess | None = None,
    ) -> None:
        self.id = uuid.uuid4()
        self._engine, self._sessions = engine, session_factory(engine)
        self._executor, self._store, self._settings, self._fits = executor, store, settings, fits
        self._policy = RetryPolicy(
            user_retries=settings.user_retries,
            infrastructure_retries=settings.infrastructure_retries,
            backoff_s=settings.backoff_s,
        )
        self._connection: Connection | None = None
        self._leading = False
        self._stopping = False
        self._evaluation_next = self._gathering = False
        self._progress: dict[uuid.UUID, TrainProgress] = {}
        self._training: dict[uuid.UUID, str] = {}
        self._told_to_stop: set[uuid.UUID] = set()  # at their next checkpoint
        self._tended_at_s = self._survey_at_s = -1e9
        self._database_wait_s = 0.0

    @property
    def leading(self) -> bool:
        """Whether this scheduler held the lead when it last looked."""
        return self._leading

    def stop(self) -> None:
        """Asks `run` to end; safe in a signal handler."""
        self._stopping = True

    def stand_by(self) -> bool:
        """Waits, without a worker, until this scheduler leads (True) or is asked to stop (False)."""
        while not self._stopping:
            try:
                self._lead()
                self._tend()
                self._database_wait_s = 0.0
            except _NO_DATABASE as error:
                self._outlast(error)
            if self._leading:
                return True
            time.sleep(self._database_wait_s or self._settings.tend_s)
        return False

    def run(self) -> None:
        """Schedules until `stop` is called. A database that goes away is waited for."""
        while not self._stopping:
            self.turn()
        self.close()

    def turn(self) -> None:
        """Waits a moment for news, records it, and begins what can begin."""
        reports = self._executor.poll(timeout_s=self._settings.poll_s)
        try:
            due = time.monotonic() - self._tended_at_s >= self._settings.tend_s
            if due:
                self._lead()
            for item in reports:
                self._deal_with(item)
            if due:
                self._tend()
            if self._leading and (due or reports):
                self._dispatch()
            self._database_wait_s = 0.0
        except _NO_DATABASE as error:
            self._outlast(error)
            time.sleep(self._database_wait_s)

    def close(self) -> None:
        """Stops all work at its next checkpoint (by force after the grace), records the rest, and gives up the lead."""
        for token in self._executor.attempts():
            self._executor.stop(token)
        deadline_s = time.monotonic() + self._settings.stop_grace_s + _LAST_REPORTS_S
        while self._executor.attempts() and time.monotonic() < deadline_s:
            try:
                for item in self._executor.poll(timeout_s=self._settings.poll_s):
                    self._deal_with(item)
            except _NO_DATABASE as error:
                self._outlast(error)
        try:
            if self._fits is not None:
                self._fits.close()
            if self._leading:
                self._leading = False
                with self._sessions.begin() as session:
                    self._heartbeat(session)
        except _NO_DATABASE as error:  # whoever leads next finds what we leave behind
            self._outlast(error)
        self._drop_connection()

    def _outlast(self, error: Exception) -> None:
        """Without a database nothing can be recorded or begun; the workers carry on and their reports are kept."""
        self._database_wait_s = min(_MAX_DATABASE_WAIT_S, max(0.25, 2 * self._database_wait_s))
        logger.warning("the database cannot be used, next try in %.2g s: %s", self._database_wait_s, error)
        self._drop_connection()
        self._leading, self._tended_at_s = False, -1e9

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.invalidate()  # ends the session, and with it the advisory lock
            self._connection.close()
            self._connection = None

    def _lead(self) -> None:
        """Takes or keeps the lead. Without it no work is kept: another scheduler owns it."""
        if self._connection is None:
            self._connection = self._engine.connect()
        led, self._leading = self._leading, leading.lead(self._connection)
        if self._leading and not led:
            logger.info("scheduler %s leads", self.id)
            self._take_over()
        if not self._leading:
            for token in self._executor.attempts():
                self._executor.stop(token)

    def _take_over(self) -> None:
        """What the scheduler before left behind goes back to the queue, at once where it is known to be dead."""
        with self._sessions.begin() as session:
            self._heartbeat(session)
            others = leading.schedulers_at_work(session, except_id=self.id)
            self._lose(session, dead=tuple(other.id for other in others if _is_dead(other)))
            fits.requeue_running_fits(session)
            record_observations(session)

    def _tend(self) -> None:
        """A sign of life; and, when leading: longer leases, what nobody works on, what became possible, re-fits."""
        with self._sessions.begin() as session:
            self._heartbeat(session)
            if self._leading:
                tokens = self._executor.attempts()
                attempts.hold_attempts(session, tokens)
                for token in tokens:
                    progress = self._progress.pop(token, None)
                    if not attempts.renew(session, token, lease_s=self._settings.lease_s, progress=progress):
                        self._executor.stop(token)  # withdrawn, or taken over while we were away
        if self._leading:
            with self._sessions.begin() as session:
                self._lose(session)
                for token in attempts.to_stop(session, scheduler_id=self.id):
                    if token not in self._told_to_stop:
                        self._told_to_stop.add(token)
                        self._executor.stop(token, at_checkpoint=True)
        began_s = time.monotonic()
        if self._leading and began_s >= self._survey_at_s:
            with self._sessions.begin() as session:
                work.promote(session)
                work.fail_orphans(session)
                if self._fits is not None:
                    fits.queue_fits(session, debounce_s=self._settings.fit_debounce_s)
            if self._settings.keep_checkpoints == "needed":
                self._give_up_checkpoints()
            ended_s = time.monotonic()
            self._survey_at_s = ended_s + 9 * (ended_s - began_s)  # however much waits, a tenth of the time at most
        if self._leading and self._fits is not None:
            self._fits.poll()
        self._tended_at_s = time.monotonic()

    def _give_up_checkpoints(self) -> None:
        with self._sessions.begin() as session:
            gone = retention.give_up_unneeded(session)
        for path in gone:
            self._remove(path)

    def _heartbeat(self, session: Session) -> None:
        leading.heartbeat(
            session,
            scheduler_id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            workers=len(self._executor),
            leading=self._leading,
        )

    def _lose(self, session: Session, *, dead: tuple[uuid.UUID, ...] = ()) -> None:
        held = self._executor.attempts()
        if lost := attempts.lose_attempts(session, scheduler_id=self.id, held=held, dead=dead):
            logger.warning("%d attempts that nobody works on went back to the queue", lost)

    def _dispatch(self) -> None:
        """Gives every free worker something to do.

        Segments (the most critical first) and evaluations take turns while both are ready: measurements flow, and
        training is held up by one evaluation at most. While a segment waits for more workers than are free, nothing
        else begins.
        """
        free = list(self._executor.free())
        while free:
            first = self._evaluation_next
            begun = self._begin(free, evaluation=first) or self._begin(free, evaluation=not first)
            if not begun:
                return
            del free[:begun]

    def _begin(self, free: Sequence[str], *, evaluation: bool) -> int:
        """Begins one piece of work on the first of the free workers; returns how many it takes."""
        if evaluation and self._gathering:
            return 0
        claim: work.ClaimedSegment | work.ClaimedEvaluation | work.Gathering | None
        lease_s = self._settings.lease_s
        with self._sessions.begin() as session:
            if evaluation:
                claim = work.claim_evaluation(session, scheduler_id=self.id, worker=free[0], lease_s=lease_s)
            else:
                claim = work.claim_segment(
                    session,
                    scheduler_id=self.id,
                    worker=free[0],
                    lease_s=lease_s,
                    free_workers=len(free),
                    alive_workers=self._executor.alive(),
                )
                self._gathering = isinstance(claim, work.Gathering)
        if claim is None or isinstance(claim, work.Gathering):
            return 0
        self._evaluation_next = not evaluation
        run, taken = claim.run, 1
        if isinstance(run, SegmentRun):
            run = dataclasses.replace(run, recovery_every_steps=self._settings.recovery_steps)
            self._training[claim.token] = claim.key
            taken = run.execution.processes
        self._executor.launch(free[:taken], claim.token, run)
        doing = "measures" if evaluation else "trains"
        logger.info("%s %s %s of %s", ", ".join(free[:taken]), doing, claim.key, claim.scale)
        return taken

    def _deal_with(self, item: WorkerReport) -> None:
        """Records a report and settles it. One that the database refuses fails its attempt, and nothing else."""
        try:
            self._record(item)
        except (IntegrityError, DataError, ValueError) as error:
            logger.exception("a report of %s cannot be recorded", item.worker)
            failure = Failure(kind="infrastructure", reason=f"its report could not be recorded: {error}")
            with self._sessions.begin() as session:
                attempts.fail_attempt(session, item.report.token, failure, policy=self._policy)
            self._executor.stop(item.report.token)
        self._executor.settle(item)

    def _record(self, item: WorkerReport) -> None:
        report = item.report
        pruned: tuple[str, ...] = ()
        if isinstance(report, Progressed):
            self._progress[report.token] = report.progress
            return
        with self._sessions.begin() as session:
            match report:
                case Saved(token=token, checkpoint=checkpoint):
                    current = attempts.record_checkpoint(session, token, checkpoint)
                    if current:
                        pruned = attempts.prune_recovery(
                            session, checkpoint.ref.segment, before_step=checkpoint.ref.step
                        )
                    else:
                        self._executor.stop(token)
                case Trained(token=token):
                    current = attempts.finish_segment(session, token)
                case Measured(token=token, evaluation=evaluation):
                    current = attempts.record_evaluation(session, token, evaluation)
                case Stopped(token=token):
                    told = token in self._told_to_stop
                    why = "its grids were paused, or want no more of it" if told else "the scheduler stopped"
                    current = attempts.stop_attempt(session, token, reason=why)
                case Failed() | Lost():
                    current = attempts.fail_attempt(session, report.token, failure_of(report), policy=self._policy)
                    if current and isinstance(report, Failed) and report.error == CheckpointConflictError.__name__:
                        self._clear_way(session, self._training[report.token])
        if isinstance(report, Failed):
            logger.warning("%s failed: %s: %s\n%s", item.worker, report.error, report.message, report.traceback)
        elif isinstance(report, Lost):
            logger.warning("%s", report.reason)
        if not current:
            logger.info("a report of %s was superseded and changed nothing", item.worker)
        if current and isinstance(report, Failed) and report.error in UNREADABLE and report.checkpoint is not None:
            self._forget(report.checkpoint, report.token)
        for path in pruned:  # row first, then file: a file without a row is harmless, a row without its file is not
            self._remove(path)
        if isinstance(report, FINAL):
            self._progress.pop(report.token, None)
            self._told_to_stop.discard(report.token)
            segment = self._training.pop(report.token, None)
            nobody_writes = current or (self._leading and segment not in self._training.values())
            if segment is not None and nobody_writes:  # else another worker may be at it by now
                remove_unfinished(self._store, segment)

    def _clear_way(self, session: Session, segment: str) -> None:
        """Removes checkpoints of a segment that no row names, while no row can come to name them. An attempt that was
        killed left them; where it had another number of processes, no other attempt can put its own in their place."""
        try:
            there = whole_checkpoints(self._store, segment)
        except StoreError as error:
            logger.warning("the checkpoints of %s cannot be listed: %s", segment, error)
            return
        for step in retention.unrecorded(session, segment, there):
            logger.warning("%s is removed: no row names it, and another is to take its place", there[step])
            self._remove(there[step])

    def _forget(self, ref: CheckpointRef, token: uuid.UUID) -> None:
        """Lets go of a checkpoint that a worker could not read, when all its tries are over."""
        with self._sessions.begin() as session:
            if retention.forget_unreadable(session, ref, token=token):
                logger.warning("step %d of %s is lost: it is trained again when it is asked for", ref.step, ref.segment)

    def _remove(self, path: str) -> None:
        try:
            mirror.remove(self._store, path)
        except StoreError as error:
            logger.warning("a checkpoint that nothing needs was left in the store: %s", error)


def main() -> int:
    """Runs the scheduler until SIGTERM or SIGINT; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    settings, options = Settings(), SchedulerSettings()
    try:
        engine = _engine(settings)
        store = _store(settings)
        executor = RayExecutor(
            workers=options.workers,
            store=settings.store,
            store_cache=settings.store_cache,
            state_dir=settings.home,
            address=options.ray_address,
            niceness=options.worker_niceness,
            gpus_per_worker=options.worker_gpus,
            silence_limit_s=options.silence_limit_s,
            stop_grace_s=options.stop_grace_s,
        )
        scheduler = Scheduler(engine, executor, store=store, settings=options, fits=FitProcess(engine))
        _stop_on_signals(scheduler)
        if scheduler.stand_by():
            with executor:
                _stop_on_signals(scheduler)  # again: Ray sets handlers of its own
                scheduler.run()
        else:
            scheduler.close()
    except (DatabaseError, OrchestratorError, StoreError) as error:
        print(f"The scheduler cannot start: {error}", file=sys.stderr)
        return 1
    return 0


def _stop_on_signals(scheduler: Scheduler) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: scheduler.stop())


def _engine(settings: Settings) -> Engine:
    url = settings.database_url.get_secret_value() if settings.database_url else running_url(settings.postgres_dir)
    if url is None:
        raise DatabaseUnavailableError(
            f"LONGLAW_DATABASE_URL is not set and no embedded Postgres runs in {settings.postgres_dir}; `longlaw up` "
            "starts everything on one machine"
        )
    engine = create_engine(url, application_name="longlaw-scheduler")
    check_at_head(engine)
    return engine


def _store(settings: Settings) -> Path:
    return mirror.open_store(settings.store, cache=settings.store_cache)


def _is_dead(other: leading.SchedulerProcess) -> bool:
    """Whether that scheduler ran on this machine and its process is gone. Elsewhere only the leases tell."""
    if other.host != socket.gethostname():
        return False
    if other.pid == os.getpid():
        return True
    try:
        began_s = psutil.Process(other.pid).create_time()
    except psutil.NoSuchProcess:
        return True
    return began_s > other.started_at_s + _CLOCK_TOLERANCE_S


if __name__ == "__main__":
    sys.exit(main())
