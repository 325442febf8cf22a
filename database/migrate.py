"""Brings a database to the tables that this code expects, and tells whether it has them.

The revisions are in the package `migrations`, found wherever it is installed; no `alembic.ini` is needed.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    CheckConstraint,
    Column,
    Connection,
    Constraint,
    Engine,
    Index,
    MetaData,
    NullPool,
    func,
    inspect,
    select,
)

from database.engine import check_available, create_engine
from database.errors import SchemaAheadError, SchemaBehindError, SchemaError
from database.models import Base

_LOCK = 7_355_608_131  # an arbitrary number; advisory locks are per database


def upgrade(url: str | URL, revision: str = "head") -> None:
    """Migrates the database to `revision`, all of it or nothing.

    Any number of processes may call this at once: one migrates, the others wait and then find nothing to do.

    Raises:
        DatabaseUnavailableError: the server does not answer.
        SchemaAheadError: the database is at a revision that this code does not know.
        SchemaError: there is no such `revision`.
    """
    with _connection(url) as connection:
        connection.execute(select(func.pg_advisory_lock(_LOCK)))  # held until the connection is closed
        connection.commit()
        _check_known(_current(connection))
        try:
            command.upgrade(_config(connection), revision)
        except CommandError as error:
            raise SchemaError(str(error)) from error
        connection.commit()


def make_revision(url: str | URL, message: str) -> None:
    """Writes a new revision file from the difference between the models and the database, which must be at head."""
    with _connection(url) as connection:
        command.revision(_config(connection), message=message, autogenerate=True)


def migrations_folder() -> Path:
    """Returns the folder of Alembic's scripts, in the source tree or wherever the wheel was installed."""
    return Path(str(files("migrations")))


def current_revision(engine: Engine) -> str | None:
    """Returns the revision of the database, None where it was never migrated.

    Raises:
        DatabaseUnavailableError: the server does not answer.
    """
    check_available(engine)
    with engine.connect() as connection:
        return _current(connection)


def head_revision() -> str | None:
    """Returns the newest revision of the code, None where there is no revision at all.

    Raises:
        SchemaError: two revisions claim to be the newest.
    """
    try:
        return _scripts().get_current_head()
    except CommandError as error:
        raise SchemaError(str(error)) from error


def check_at_head(engine: Engine) -> None:
    """Compares the database's revision with the code's.

    Raises:
        DatabaseUnavailableError: the server does not answer.
        SchemaBehindError: migrations are missing.
        SchemaAheadError: the database was migrated by a newer version.
    """
    current, head = current_revision(engine), head_revision()
    _check_known(current)
    if current != head:
        raise SchemaBehindError(f"The database is at revision {current}, the code at {head}: run `longlaw db upgrade`.")


def pending_changes(url: str | URL) -> list[str]:
    """Returns what the models ask for and the migrated database lacks or has otherwise, one line each.

    Compares tables, columns, types, defaults, keys and indexes of the default schema, and the names of CHECKs (what a
    CHECK says is not compared). Views and functions have no model.
    """
    with _connection(url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        differences = compare_metadata(context, Base.metadata)
        return [line for item in differences for line in _describe(item)] + _check_differences(
            connection, Base.metadata
        )


def _describe(difference: Any) -> Iterator[str]:
    if isinstance(difference, list):  # alterations of one column come as a list
        for item in difference:
            yield from _describe(item)
    else:
        operation, *parts = difference
        told = [_label(part) for part in parts if part is not None and not isinstance(part, dict)]
        yield f"{operation}: {' '.join(told)}"


def _label(part: Any) -> str:
    if isinstance(part, Column | Index | Constraint):
        return f"{part.table.name}.{part.name}" if part.table is not None else str(part.name)
    return str(part)


def _check_differences(connection: Connection, metadata: MetaData) -> list[str]:
    inspector, format_name = inspect(connection), connection.dialect.identifier_preparer.format_constraint
    lines = []
    for table in metadata.sorted_tables:
        if not inspector.has_table(table.name):
            continue  # already told as a missing table
        wanted = {format_name(item) for item in table.constraints if isinstance(item, CheckConstraint)}
        present = {item["name"] for item in inspector.get_check_constraints(table.name)}
        lines += [f"add_check: {table.name}.{name}" for name in sorted(wanted - present, key=str)]
        lines += [f"remove_check: {table.name}.{name}" for name in sorted(present - wanted, key=str)]
    return lines


@contextmanager
def _connection(url: str | URL) -> Iterator[Connection]:
    engine = create_engine(url, application_name="longlaw-migrate", poolclass=NullPool)
    check_available(engine)
    with engine.connect() as connection:
        yield connection


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return _scripts_in(migrations_folder())


@functools.cache  # revisions are read once: every look at readiness needs them
def _scripts_in(folder: Path) -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _check_known(revision: str | None) -> None:
    if revision is not None and revision not in {script.revision for script in _scripts().walk_revisions()}:
        raise SchemaAheadError(
            f"The database is at revision {revision}, which this version of Longlaw does not know: install the newer "
            "version that migrated it."
        )
