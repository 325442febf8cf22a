"""A real Postgres server on this machine, started by and ending with the process that needs it.

One folder holds everything: the data, a generated password (mode 0600), the port and the server's log. Several
processes may ask for the same folder: one starts the server, the others adopt it.

The rule that makes this safe is a lock on a file in that folder. The starter takes it and hands it down, as an open
file, to the server and all its children. So whoever gets the lock knows that no process of this server is alive, not
even an orphan of a killed one, and may clear a stale `postmaster.pid`.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import psycopg
from psycopg import sql

from database.binaries import ServerUser, plain_environment, psql_path, usable_binaries
from database.cluster import (
    HOST,
    NAME,
    check_cluster,
    connect,
    create_cluster,
    drop_stale_pidfile,
    prepare_folder,
    running_url,
    stored_url,
    write_private,
)
from database.errors import EmbeddedPostgresError, PortTakenError

__all__ = ["EmbeddedPostgres", "embedded_postgres", "psql_path", "running_url", "scratch_folder", "scratch_postgres"]

_PORTS = range(20_000, 30_000)  # below the kernel's ephemeral ports, so a remembered port is rarely lost; above Ray's
_SCRATCH = "longlaw-scratch-"
_ROOMY_BYTES = 2 * 2**30
_SETTLED_S = 60.0
_OPTIONS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # their paths are limited to 107 bytes; TCP works everywhere
    "dynamic_shared_memory_type": "mmap",  # a container's small /dev/shm breaks parallel queries
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres:
    """The embedded server of one state folder.

    A context manager: entering starts the server or adopts the running one, leaving stops it if we started it. The
    owner should call `ensure_running` now and then; a killed owner takes the server down with it (on Linux).

    Args:
        state_dir: our own folder, created if missing; as root, `nobody` must be able to reach it.
        port: the TCP port to use; by default one is chosen at the first start and remembered.
        options: Postgres settings beside ours, for instance `{"fsync": "off"}` in tests.
        timeout_s: how long to wait for a start (crash recovery included) and for a stop.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.state_dir = state_dir.expanduser().resolve()
        self._log = self.state_dir / "server.log"
        self._port = port
        self._options = {**_OPTIONS, **(options or {})}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The SQLAlchemy URL, password included; the same in every run unless another program takes the port."""
        url = stored_url(self.state_dir)
        if url is None:
            raise EmbeddedPostgresError(f"The embedded Postgres in {self.state_dir} was never started.")
        return url.render_as_string(hide_password=False)

    @property
    def pid(self) -> int | None:
        """The server's process id where this object started it, None for an adopted or stopped server."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def ensure_running(self) -> bool:
        """Starts the server again if it is gone; returns whether that was needed."""
        if self.pid is not None or running_url(self.state_dir) is not None:
            return False
        self.start()
        return True

    def start(self) -> str:
        """Starts the server, or adopts the one that another process runs here; returns its URL.

        Raises:
            PortTakenError: `port` was given and another program has it.
            EmbeddedPostgresError: anything else; the message ends with the server's log where there is one.
        """
        user = prepare_folder(self.state_dir)
        with self._lock(user) as lock:
            if lock is None or running_url(self.state_dir) is not None:
                return self.url
            binaries = usable_binaries(self.state_dir, user)
            data = self.state_dir / "data"
            if not data.exists():
                create_cluster(self.state_dir, binaries, user, sync=self._options.get("fsync") != "off")
            check_cluster(self.state_dir)
            drop_stale_pidfile(self.state_dir)
            self._log.touch(0o600)
            user.own(self._log)
            attempts = 1 if self._port is not None else 3  # someone may take a port between our look and the server's
            for _ in range(attempts):
                port = self._choose_port()
                write_private(self.state_dir / "port", str(port), user)
                settings = {**self._options, "port": str(port)}
                flags = [f"--{name}={value}" for name, value in settings.items()]
                self._process = self._spawn(user.command(binaries / "postgres", "-D", data, *flags), lock)
                if self._wait_until_ready(self._process):
                    return self.url
            raise EmbeddedPostgresError(f"The embedded Postgres does not start:\n{self._log_tail()}")

    def stop(self) -> None:
        """Stops the server if this object started it: open sessions end, committed data is on disk."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGQUIT)  # immediate shutdown; the next start recovers from the log
            process.wait(self._timeout_s)

    @contextlib.contextmanager
    def _lock(self, user: ServerUser) -> Iterator[int | None]:
        """Yields the locked file, or None as soon as the server of another starter answers."""
        path, deadline = self.state_dir / "lock", time.monotonic() + self._timeout_s
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            user.own(path)
            while not _try_lock(lock):
                if running_url(self.state_dir) is not None:
                    yield None
                    return
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(
                        f"A process of this Postgres still holds {path}, but does not answer:\n{self._log_tail()}"
                    )
                time.sleep(0.1)
            yield lock
        finally:
            os.close(lock)  # the server's own copy keeps the lock

    def _choose_port(self) -> int:
        if self._port is not None:
            if not _is_free(self._port):
                raise PortTakenError(f"Port {self._port} of {HOST} is taken by another program; choose another port.")
            return self._port
        stored = stored_url(self.state_dir)
        if stored is not None and stored.port is not None and _is_free(stored.port):
            return stored.port
        for port in random.sample(_PORTS, k=100):
            if _is_free(port):
                return port
        raise PortTakenError(f"No free port found between {_PORTS.start} and {_PORTS.stop}.")

    def _spawn(self, command: list[str], lock: int) -> subprocess.Popen[bytes]:
        """Starts the server from a thread that lives exactly as long as it.

        The kernel ties the parent-death signal to the thread that forked, not to the process, so that thread must
        stay; and a dead server that nobody waits for would keep its process id and block the next start.
        """
        started: Future[subprocess.Popen[bytes]] = Future()

        def own_server() -> None:
            try:
                with self._log.open("ab") as log:
                    process = subprocess.Popen(
                        command,
                        cwd="/",
                        env=plain_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=(lock,),
                        start_new_session=True,  # Ctrl-C must reach us first, and the server through us
                    )
            except BaseException as error:
                started.set_exception(error)
            else:
                started.set_result(process)
                process.wait()

        threading.Thread(target=own_server, name="postgres", daemon=True).start()
        return started.result()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Returns True once the server answers and has our database, False if it ended instead."""
        deadline = time.monotonic() + self._timeout_s
        while process.poll() is None:
            with contextlib.suppress(psycopg.OperationalError), connect(self.state_dir, "postgres") as connection:
                if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (NAME,)).fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(NAME)))
                return True
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedPostgresError(
                    f"The embedded Postgres did not answer within {self._timeout_s:g} s:\n{self._log_tail()}"
                )
            time.sleep(0.05)
        return False

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "(no log)"


@contextlib.contextmanager
def embedded_postgres(
    state_dir: Path, *, port: int | None = None, options: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Runs the embedded server of `state_dir` for the block and yields its SQLAlchemy URL; see `EmbeddedPostgres`."""
    with EmbeddedPostgres(state_dir, port=port, options=options) as server:
        yield server.url


@contextlib.contextmanager
def scratch_postgres() -> Iterator[str]:
    """Runs an empty server without durability in a scratch folder, for tests and checks, and yields its URL."""
    options = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_wal_size": "128MB"}
    with scratch_folder() as folder, embedded_postgres(folder / "postgres", options=options) as url:
        yield url


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a temporary folder that every user may enter, in memory where there is room (and TMPDIR is not set).

    A fresh database is some 300 files: copying one takes 0.02 s in memory and up to 1 s on a busy disk.
    """
    memory = Path("/dev/shm")
    roomy = "TMPDIR" not in os.environ and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOMY_BYTES
    parent = memory if roomy else Path(tempfile.gettempdir())
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=parent) as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            _try_lock(lock)
            Path(folder).chmod(0o755)
            yield Path(folder)
        finally:
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Removes the scratch folders of killed processes: those whose lock is free although they are not new."""
    for folder in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # someone else's, or already gone
            lock = os.open(folder, os.O_RDONLY)
            try:
                if time.time() - folder.stat().st_mtime > _SETTLED_S and _try_lock(lock):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Postgres does: closed connections do not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
