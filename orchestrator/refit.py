"""Re-fits: one process at a time works through the queue of fits, while the scheduler goes on scheduling."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

from sqlalchemy import Engine

from database.engine import session_factory
from database.fits import claim_fit, fail_fit, requeue_fit

_MODULE = "orchestrator.fit_job"  # not imported: the scheduler needs no scipy
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_TRIES = 3


class FitProcess:
    """The one process that fits, driven by the scheduler's loop: call `poll` in every round and `close` at the end.

    A process that dies or runs too long is tried again, three times in all; then its fit has FAILED.

    Args:
        engine: the results database.
        timeout_s: how long one fit may take.
        clock: monotonic seconds.
    """

    def __init__(
        self, engine: Engine, *, timeout_s: float = 600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = engine.url.render_as_string(hide_password=False)
        self._sessions = session_factory(engine)
        self._timeout_s = timeout_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._fit_id: uuid.UUID | None = None
        self._deadline = 0.0
        self._deaths: dict[uuid.UUID, int] = {}

    @property
    def fit_id(self) -> uuid.UUID | None:
        """The fit being done."""
        return self._fit_id

    def poll(self) -> bool:
        """Takes note of a process that has ended and starts the next waiting fit; never waits for either.

        Returns:
            Whether a fit has ended or begun.
        """
        ended = self._reap()
        return self._start() or ended

    def close(self) -> None:
        """Stops the process, if any, and puts its fit back."""
        if self._process is not None and self._fit_id is not None:
            self._process.kill()
            self._process.wait()
            with self._sessions.begin() as session:
                requeue_fit(session, self._fit_id)
        self._process = self._fit_id = None

    def _start(self) -> bool:
        if self._process is not None:
            return False
        with self._sessions.begin() as session:
            job = claim_fit(session)
        if job is None:
            return False
        environment = os.environ | dict.fromkeys(_ONE_THREAD, "1") | {"LONGLAW_DATABASE_URL": self._url}
        self._fit_id = job.fit_id
        self._deadline = self._clock() + self._timeout_s
        command = [sys.executable, "-m", _MODULE, str(job.fit_id)]
        try:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._note_death(job.fit_id, f"no process could be started: {error}")
            self._fit_id = None
        return True

    def _reap(self) -> bool:
        if self._process is None or self._fit_id is None:
            return False
        code, reason = self._process.poll(), ""
        if code is None and self._clock() < self._deadline:
            return False
        if code is None:
            self._process.kill()
            self._process.wait()
            reason = f"the fit took more than {self._timeout_s:g} s"
        elif code != 0:
            reason = f"the fitting process ended with exit code {code}"
        if reason:
            self._note_death(self._fit_id, reason)
        else:
            self._deaths.pop(self._fit_id, None)
        self._process = self._fit_id = None
        return True

    def _note_death(self, fit_id: uuid.UUID, reason: str) -> None:
        """Nothing changes here where the process has told its own reason before it ended."""
        deaths = self._deaths.get(fit_id, 0) + 1
        with self._sessions.begin() as session:
            if deaths >= _TRIES:
                fail_fit(session, fit_id, f"{reason}, {deaths} times in a row")
            else:
                requeue_fit(session, fit_id)
        self._deaths[fit_id] = deaths
