"""The whole stack on one machine: Postgres, API and scheduler as children of one process that watches them.

The owner starts everything, restarts what dies and stops everything. Killed without warning, it takes its children down
with it (on Linux), and the next start goes on from what Postgres and the store hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import httpx

from database.embedded import EmbeddedPostgres
from database.migrate import upgrade
from database.settings import Settings

_LOOPBACK = "127.0.0.1"
_PORTS = range(8000, 8100)
_STOP_GRACE_S = 30.0
_QUICK_DEATH_S = 10.0
_MAX_QUICK_DEATHS = 3
_PR_SET_PDEATHSIG = 1
#: What the children import first; each is of an extra that this command itself does without.
_NEEDED = ("fastapi", "uvicorn", "ray", "torch")


class StackError(Exception):
    """The stack cannot start or cannot be kept running; the message says which part and where its log is."""


@dataclass(slots=True, kw_only=True)
class _Child:
    """A supervised process: its command, its log, and how often it died right after a start."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    quick_deaths: int = 0
    restart_at_s: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the owner alone, which then stops its children in order
                preexec_fn=_die_with_parent,
            )
        self.started_s = time.monotonic()

    def watch(self) -> None:
        """Starts the process again if it died; gives up when it keeps dying at once."""
        now = time.monotonic()
        if self.process is not None and self.process.poll() is not None:
            quick = now - self.started_s < _QUICK_DEATH_S
            self.quick_deaths = self.quick_deaths + 1 if quick else 0
            if self.quick_deaths >= _MAX_QUICK_DEATHS:
                raise StackError(
                    f"The {self.name} ended {self.quick_deaths} times right after its start (exit code "
                    f"{self.process.returncode}). The end of {self.log}:\n{_tail(self.log)}"
                )
            self.process = None
            self.restart_at_s = now + 2.0**self.quick_deaths
        if self.process is None and now >= self.restart_at_s:
            self.start()

    def stop(self, deadline_s: float) -> None:
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True, kw_only=True)
class Stack:
    """Postgres (unless `LONGLAW_DATABASE_URL` names one), API and scheduler; a context manager.

    Args:
        settings: where things live.
        api_port: the API's port on loopback; None takes the first free one from 8000 on.
        workers: training processes; None leaves the choice to the scheduler (one per core).

    Raises:
        StackError: on entering, when another stack already runs in this home or a part does not start.
        ModuleNotFoundError: on entering, when an extra that a part needs is not installed.
    """

    settings: Settings
    api_port: int | None = None
    workers: int | None = None
    _postgres: EmbeddedPostgres | None = None
    _children: list[_Child] = field(default_factory=list)
    _lock: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.api_port}"

    @property
    def logs(self) -> Path:
        return self.settings.home / "logs"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        for module in _NEEDED:
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = (self.settings.home / "up.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"Longlaw already runs in {self.settings.home}: stop it, or set LONGLAW_HOME to another folder."
            ) from None
        port = self.api_port = self.api_port or _free_port()
        if not _is_free(port):
            raise StackError(f"Port {port} is taken by another program: choose another one with --port.")
        database_url = self._start_database()
        upgrade(database_url)
        environment = {
            **os.environ,
            "LONGLAW_HOME": str(self.settings.home),
            "LONGLAW_DATABASE_URL": database_url,
            "LONGLAW_STORE": self.settings.store,
            "LONGLAW_API_HOST": _LOOPBACK,
            "LONGLAW_API_PORT": str(port),
        }
        if self.workers is not None:
            environment["LONGLAW_WORKERS"] = str(self.workers)
        for name, module in (("scheduler", "orchestrator.scheduler"), ("API", "api")):
            child = _Child(
                name=name,
                command=(sys.executable, "-m", module),
                environment=environment,
                log=self.logs / f"{name.lower()}.log",
            )
            child.start()
            self._children.append(child)

    def _start_database(self) -> str:
        if self.settings.database_url is not None:
            return self.settings.database_url.get_secret_value()
        self._postgres = EmbeddedPostgres(self.settings.postgres_dir)
        return self._postgres.start()

    def watch(self) -> None:
        """Looks after the parts once: whatever died is started again. Call it every second or so.

        Raises:
            StackError: a part keeps dying at once.
        """
        if self._postgres is not None:
            self._postgres.ensure_running()
        for child in self._children:
            child.watch()

    def wait_until_ready(self, *, timeout_s: float = 120.0) -> None:
        """Returns when the API answers that its database is there and migrated.

        Raises:
            StackError: it does not within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < deadline_s:
                self.watch()
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        return
                time.sleep(0.2)
        raise StackError(f"The API did not become ready within {timeout_s:g} s; see {self.logs / 'api.log'}.")

    def stop(self) -> None:
        """Stops the children (work goes back to the queue at its last checkpoint), then the database."""
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.terminate()
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for child in self._children:
            child.stop(deadline_s)
        self._children.clear()
        if self._postgres is not None:
            self._postgres.stop()
            self._postgres = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _free_port() -> int:
    port = next(filter(_is_free, _PORTS), None)
    if port is None:
        raise StackError(f"No free port from {_PORTS.start} to {_PORTS.stop - 1}: pass --port.")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a server before us left does not count
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
        return True


def _tail(log: Path, *, size_bytes: int = 2_000) -> str:
    return log.read_text(errors="replace")[-size_bytes:] if log.exists() else "(no log)"
