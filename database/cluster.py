"""The folder of the embedded server: its data, password, port and lock, and who may read them."""

import os
import secrets
import shutil
from pathlib import Path

import psutil
import psycopg
from sqlalchemy import URL

from database.binaries import POSTGRES_MAJOR, ServerUser, first_closed_directory, server_user
from database.errors import EmbeddedPostgresError

HOST = "127.0.0.1"
NAME = "longlaw"  # of the superuser and of the database


def prepare_folder(folder: Path) -> ServerUser:
    """Creates the state folder, owned by the server's user and closed to all others, and returns that user.

    Only this folder's mode is ever changed: directories above it are other people's.

    Raises:
        EmbeddedPostgresError: the folder is someone else's, or the server's user cannot reach it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / "lock").exists():
            raise EmbeddedPostgresError(f"{folder} is neither empty nor an embedded Postgres; choose another folder.")
        user = server_user(folder)
        if closed := first_closed_directory([*reversed(folder.parents)], user):
            raise EmbeddedPostgresError(
                f"Postgres runs as user id {user.uid}, never as root, and that user may not enter {closed}. Set "
                "LONGLAW_HOME to a folder that others can reach (such as /var/lib/longlaw), run as an ordinary user, "
                "or point LONGLAW_DATABASE_URL at a Postgres server."
            )
        user.own(folder)
        folder.chmod(0o700)
    except PermissionError as error:
        raise EmbeddedPostgresError(f"{folder} cannot be used: {error.strerror}.") from error
    return user


def create_cluster(folder: Path, binaries: Path, user: ServerUser, *, sync: bool) -> None:
    """Makes the data directory aside and renames it, so that a killed `initdb` leaves no half of one."""
    unfinished, password = folder / "data.tmp", folder / "password"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_private(password, secrets.token_urlsafe(24), user)
    # The built-in locale is the same on every machine, so text sorts alike everywhere.
    locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    access = [f"--username={NAME}", "--auth=scram-sha-256", f"--pwfile={password}"]
    durability = [] if sync else ["--no-sync"]
    outcome = user.run(binaries / "initdb", f"--pgdata={unfinished}", *access, *locale, *durability)
    if outcome.returncode:
        raise EmbeddedPostgresError(f"initdb failed:\n{outcome.stderr[-2000:]}")
    unfinished.rename(folder / "data")


def check_cluster(folder: Path) -> None:
    """Raises EmbeddedPostgresError where the data is of another Postgres version or its password is lost."""
    version = (folder / "data" / "PG_VERSION").read_text().strip()
    if version != str(POSTGRES_MAJOR):
        raise EmbeddedPostgresError(
            f"{folder / 'data'} was written by Postgres {version}; this is Postgres {POSTGRES_MAJOR}. Move the data "
            "with pg_dump and the old version, or start in another LONGLAW_HOME."
        )
    if not (folder / "password").exists():
        raise EmbeddedPostgresError(f"{folder / 'password'} is missing, and only it opens the data beside it.")


def drop_stale_pidfile(folder: Path) -> None:
    """Removes a `postmaster.pid` whose process id is dead, a zombie, or by now another program's."""
    data = folder / "data"
    pidfile = data / "postmaster.pid"
    try:
        alive = psutil.Process(int(pidfile.read_text().split()[0])).cwd() == str(data)
    except FileNotFoundError:
        return
    except (ValueError, IndexError, psutil.Error):
        alive = False
    if not alive:  # else someone started this data directory by other means, and Postgres will say so
        pidfile.unlink()


def write_private(path: Path, text: str, user: ServerUser) -> None:
    """Writes a file that only the server's user (and root) can read, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    user.own(unfinished)
    unfinished.replace(path)


def stored_url(folder: Path) -> URL | None:
    """Returns the URL that the folder's files spell, None before the first start; the server need not be running.

    Raises:
        EmbeddedPostgresError: the folder belongs to another user.
    """
    try:
        password = (folder / "password").read_text()
        port = int((folder / "port").read_text())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise EmbeddedPostgresError(f"The embedded Postgres in {folder} belongs to another user.") from error
    return URL.create("postgresql+psycopg", username=NAME, password=password, host=HOST, port=port, database=NAME)


def connect(folder: Path, database: str) -> psycopg.Connection[tuple[object, ...]]:
    """Opens an autocommit connection to the folder's server.

    Raises:
        psycopg.OperationalError: it does not answer, or another server does.
    """
    url = stored_url(folder)
    if url is None:
        raise psycopg.OperationalError(f"the embedded Postgres in {folder} was never started")
    connection = psycopg.connect(
        host=HOST,
        port=url.port,
        user=NAME,
        password=str(url.password),
        dbname=database,
        connect_timeout=3,
        autocommit=True,
    )
    # A copied state folder has the same password and port; only the path tells the two servers apart.
    row = connection.execute("SHOW data_directory").fetchone()
    if row is None or row[0] != str(folder / "data"):
        connection.close()
        raise psycopg.OperationalError(f"port {url.port} belongs to the server of another folder")
    return connection


def running_url(state_dir: Path) -> str | None:
    """Returns the SQLAlchemy URL of the embedded server of `state_dir`, None where it does not answer.

    Raises:
        EmbeddedPostgresError: the folder belongs to another user.
    """
    folder = state_dir.expanduser().resolve()
    try:
        connect(folder, NAME).close()
    except psycopg.OperationalError:
        return None
    url = stored_url(folder)
    return url.render_as_string(hide_password=False) if url is not None else None
