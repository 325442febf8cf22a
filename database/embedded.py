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
import secrets
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

import psutil
import psycopg
from psycopg import sql
from sqlalchemy import URL

from database.binaries import (
    POSTGRES_MAJOR,
    ServerUser,
    first_closed_directory,
    plain_environment,
    psql_path,
    server_user,
    usable_binaries,
)
from database.errors import EmbeddedPostgresError, PortTakenError

__all__ = ["EmbeddedPostgres", "embedded_postgres", "psql_path", "running_url", "scratch_postgres"]

_HOST = "127.0.0.1"
_NAME = "longlaw"  # of the superuser and of the database
_PORTS = range(20_000, 30_000)  # below the kernel's ephemeral ports, so a remembered port is rarely lost; above Ray's
_LOG_TAIL_BYTES = 2_000
_OPTIONS = {
    "listen_addresses": _HOST,
    "unix_socket_directories": "",  # their paths are limited to 107 bytes; TCP works everywhere
    "dynamic_shared_memory_type": "mmap",  # a container's small /dev/shm breaks parallel queries
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres:
    """The embedded server of one state directory.

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
        self._data = self.state_dir / "data"
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
        url = _stored_url(self.state_dir)
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
        user = self._prepare_folder()
        with self._lock(user) as lock:
            if lock is None or running_url(self.state_dir) is not None:
                return self.url
            binaries = usable_binaries(self.state_dir, user)
            if not self._data.exists():
                self._create_cluster(binaries, user)
            self._check_cluster()
            _drop_stale_pidfile(self._data)
            attempts = 1 if self._port is not None else 3  # someone may take a port between our look and the server's
            for _ in range(attempts):
                port = self._choose_port()
                _write_private(self.state_dir / "port", str(port), user)
                settings = {**self._options, "port": str(port)}
                flags = [f"--{name}={value}" for name, value in settings.items()]
                self._process = self._spawn(user.command(binaries / "postgres", "-D", self._data, *flags), lock)
                if self._wait_until_ready():
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

    def _prepare_folder(self) -> ServerUser:
        """Creates the state directory, owned by the server's user and closed to others; checks that they reach it."""
        folder = self.state_dir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()) and not (folder / "lock").exists():
                raise EmbeddedPostgresError(
                    f"{folder} is neither empty nor an embedded Postgres; choose another folder."
                )
            user = server_user(folder)
            if closed := first_closed_directory([*reversed(folder.parents)], user):
                raise EmbeddedPostgresError(
                    f"Postgres does not run as root but as user id {user.uid}, who may not enter {closed}. Set "
                    "LONGLAW_HOME to a folder that others can reach (such as /var/lib/longlaw), run as an ordinary "
                    "user, or point LONGLAW_DATABASE_URL at a Postgres server."
                )
            user.own(folder)
            folder.chmod(0o700)
        except PermissionError as error:
            raise EmbeddedPostgresError(f"{folder} belongs to another user: {error.strerror}.") from error
        return user

    @contextlib.contextmanager
    def _lock(self, user: ServerUser) -> Iterator[int | None]:
        """Yields the locked file, or None as soon as the server of another starter answers."""
        deadline = time.monotonic() + self._timeout_s
        lock = os.open(self.state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            user.own(self.state_dir / "lock")
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if running_url(self.state_dir) is not None:
                    os.close(lock)
                    lock = -1
                    break
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(
                        f"Another process holds {self.state_dir / 'lock'}, but its Postgres does not answer:\n"
                        f"{self._log_tail()}"
                    )
                time.sleep(0.1)
            yield lock if lock >= 0 else None
        finally:
            if lock >= 0:
                os.close(lock)  # the server's own copy keeps the lock

    def _create_cluster(self, binaries: Path, user: ServerUser) -> None:
        """Makes a new data directory aside and renames it, so that a killed `initdb` leaves no half of one."""
        unfinished, password = self.state_dir / "data.tmp", self.state_dir / "password"
        shutil.rmtree(unfinished, ignore_errors=True)
        _write_private(password, secrets.token_urlsafe(24), user)
        # The built-in locale is the same on every machine, so text sorts alike everywhere.
        locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        access = [f"--username={_NAME}", "--auth=scram-sha-256", f"--pwfile={password}"]
        sync = ["--no-sync"] if self._options.get("fsync") == "off" else []
        outcome = user.run(binaries / "initdb", f"--pgdata={unfinished}", *access, *locale, *sync)
        if outcome.returncode:
            raise EmbeddedPostgresError(f"initdb failed:\n{outcome.stderr[-_LOG_TAIL_BYTES:]}")
        unfinished.rename(self._data)

    def _check_cluster(self) -> None:
        version = (self._data / "PG_VERSION").read_text().strip()
        if version != str(POSTGRES_MAJOR):
            raise EmbeddedPostgresError(
                f"{self._data} was written by Postgres {version}; this is Postgres {POSTGRES_MAJOR}. Move the data "
                "with pg_dump and the old version, or start in another LONGLAW_HOME."
            )
        if not (self.state_dir / "password").exists():
            raise EmbeddedPostgresError(
                f"{self.state_dir / 'password'} is missing, and only it opens the data beside it."
            )

    def _choose_port(self) -> int:
        if self._port is not None:
            if not _is_free(self._port):
                raise PortTakenError(f"Port {self._port} of {_HOST} is taken by another program; choose another port.")
            return self._port
        stored = _stored_url(self.state_dir)
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

    def _wait_until_ready(self) -> bool:
        """Returns True once the server answers and has our database, False if it ended instead."""
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while self._process.poll() is None:
            with contextlib.suppress(psycopg.OperationalError), _connect(self.state_dir, "postgres") as connection:
                if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (_NAME,)).fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_NAME)))
                return True
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedPostgresError(
                    f"The embedded Postgres did not answer within {self._timeout_s:g} s:\n{self._log_tail()}"
                )
            time.sleep(0.05)
        return False

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL_BYTES:] if self._log.exists() else "(no log)"


@contextlib.contextmanager
def embedded_postgres(
    state_dir: Path, *, port: int | None = None, options: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Runs the embedded server of `state_dir` for the block and yields its SQLAlchemy URL; see `EmbeddedPostgres`."""
    with EmbeddedPostgres(state_dir, port=port, options=options) as server:
        yield server.url


@contextlib.contextmanager
def scratch_postgres() -> Iterator[str]:
    """Runs an empty server without durability in a temporary folder, for tests and checks, and yields its URL."""
    with tempfile.TemporaryDirectory(prefix="longlaw-postgres-") as folder:
        Path(folder).chmod(0o755)  # for `nobody`, where we are root; the server's own folder inside is closed
        options = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        with embedded_postgres(Path(folder, "postgres"), options=options) as url:
            yield url


def running_url(state_dir: Path) -> str | None:
    """Returns the SQLAlchemy URL of the server of `state_dir`, None where it does not answer.

    Raises:
        EmbeddedPostgresError: the folder belongs to another user.
    """
    state_dir = state_dir.expanduser().resolve()
    url = _stored_url(state_dir)
    if url is None:
        return None
    try:
        with _connect(state_dir, _NAME) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
    except psycopg.OperationalError:
        return None
    # A copied state directory has the same port and password: only the path tells the two servers apart.
    ours = row is not None and row[0] == str(state_dir / "data")
    return url.render_as_string(hide_password=False) if ours else None


def _stored_url(state_dir: Path) -> URL | None:
    try:
        password = (state_dir / "password").read_text()
        port = int((state_dir / "port").read_text())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise EmbeddedPostgresError(f"The embedded Postgres in {state_dir} belongs to another user.") from error
    return URL.create("postgresql+psycopg", username=_NAME, password=password, host=_HOST, port=port, database=_NAME)


def _connect(state_dir: Path, database: str) -> psycopg.Connection[tuple[object, ...]]:
    url = _stored_url(state_dir)
    if url is None:
        raise psycopg.OperationalError("never started")
    password = str(url.password)
    return psycopg.connect(
        host=_HOST, port=url.port, user=_NAME, password=password, dbname=database, connect_timeout=3, autocommit=True
    )


def _drop_stale_pidfile(data: Path) -> None:
    """Removes a `postmaster.pid` whose process id is dead, a zombie, or by now another program's."""
    pidfile = data / "postmaster.pid"
    try:
        alive = psutil.Process(int(pidfile.read_text().split()[0])).cwd() == str(data)
    except FileNotFoundError:
        return
    except (ValueError, IndexError, psutil.Error):
        alive = False
    if not alive:  # else someone started this data directory by other means, and Postgres will say so
        pidfile.unlink()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Postgres does: closed connections do not count
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _write_private(path: Path, text: str, user: ServerUser) -> None:
    """Writes a file that only the server's user (and root) can read, whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    user.own(unfinished)
    unfinished.replace(path)
