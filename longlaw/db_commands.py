"""`longlaw db`: the results database's URL, its migrations, and a SQL prompt."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import ValidationError
from sqlalchemy import URL, NullPool

from database.binaries import plain_environment
from database.embedded import embedded_postgres, psql_path, running_url, scratch_postgres
from database.engine import create_engine, parse_url
from database.errors import DatabaseError, DatabaseUnavailableError
from database.migrate import check_at_head, current_revision, head_revision, make_revision, pending_changes
from database.migrate import upgrade as migrate
from database.settings import Settings

db_app = typer.Typer(help="The results database: its URL, its migrations, a SQL prompt.", no_args_is_help=True)


def find_database(settings: Settings) -> str:
    """Returns the URL of the database that is there: the configured one, else the running embedded one.

    Raises:
        DatabaseUnavailableError: none is configured and the embedded one is not running.
    """
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    url = running_url(settings.postgres_dir)
    if url is None:
        raise DatabaseUnavailableError(
            f"The embedded Postgres in {settings.postgres_dir} is not running. `longlaw up` starts it and serves, "
            "`longlaw db psql` opens it for a SQL prompt; LONGLAW_DATABASE_URL names another server."
        )
    return url


@contextmanager
def open_database(settings: Settings) -> Iterator[str]:
    """Yields the URL of the configured database, else of the embedded one, started for the block if need be."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
    else:
        with embedded_postgres(settings.postgres_dir) as url:
            yield url


@db_app.command()
def url(
    show_password: Annotated[bool, typer.Option("--show-password", help="Print the password too.")] = False,
) -> None:
    """Print the URL of the results database, for psql, SQLAlchemy or LONGLAW_DATABASE_URL."""
    with _errors_told():
        found = parse_url(find_database(Settings())).set(drivername="postgresql")
        typer.echo(found.render_as_string(hide_password=not show_password))


@db_app.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="The revision to migrate to.")] = "head",
) -> None:
    """Migrate the results database; harmless where there is nothing to do."""
    with _errors_told(), open_database(Settings()) as database_url:
        migrate(database_url, revision)
        typer.echo(_revision_line(database_url))


@db_app.command()
def current() -> None:
    """Print the revision of the running database and whether it is the newest."""
    with _errors_told():
        typer.echo(_revision_line(find_database(Settings())))


@db_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def psql(context: typer.Context) -> None:
    """Open psql on the results database; further arguments go to psql (longlaw db psql -c 'SELECT 1')."""
    with _errors_told():
        settings = Settings()
        external = settings.database_url is not None
        if not external and not settings.postgres_dir.exists():
            raise DatabaseUnavailableError(
                f"There is no database in {settings.home} yet; `longlaw db upgrade` makes one."
            )
        with open_database(settings) as database_url:
            parsed = parse_url(database_url)
            # The bundled psql fits the embedded server; a remote one may ask for TLS, which only the system's speaks.
            program = (shutil.which("psql") if external else None) or str(psql_path())
            environment = dict(os.environ) if external else plain_environment()
            if parsed.password is not None:
                environment["PGPASSWORD"] = parsed.password  # other users can read command lines, not environments
            target = URL.create(
                "postgresql", parsed.username, None, parsed.host, parsed.port, parsed.database, parsed.query
            )
            arguments = [f"--dbname={target.render_as_string()}", *context.args]
            with _interrupts_left_to_child():
                returncode = subprocess.run([program, *arguments], env=environment).returncode
    raise typer.Exit(returncode)


@db_app.command()
def check() -> None:
    """Compare models and migrations; list the differences and exit 1 where there are any.

    Looks at LONGLAW_DATABASE_URL where it is set, else at a scratch server that it migrates first.
    """
    with _errors_told():
        configured = Settings().database_url
        if configured is not None:
            database_url = configured.get_secret_value()
            engine = create_engine(database_url, poolclass=NullPool)
            check_at_head(engine)
            differences = pending_changes(database_url)
        else:
            with scratch_postgres() as database_url:
                migrate(database_url)
                differences = pending_changes(database_url)
    for line in differences:
        typer.echo(line)
    if differences:
        typer.echo(f"{len(differences)} differences between models and migrations.", err=True)
        raise typer.Exit(1)
    typer.echo(f"Models and migrations agree (revision {head_revision()}).")


@db_app.command()
def revision(message: Annotated[str, typer.Argument(help="What changes, in a few words.")]) -> None:
    """Write a migration from the difference between models and migrations, for a developer to edit."""
    with _errors_told(), scratch_postgres() as database_url:
        migrate(database_url)
        make_revision(database_url, message)


def _revision_line(database_url: str) -> str:
    found, head = current_revision(create_engine(database_url, poolclass=NullPool)), head_revision()
    return f"{found} (head)" if found == head else f"{found} (head is {head}: run `longlaw db upgrade`)"


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turns an error with a name into one line on stderr and exit code 1."""
    try:
        yield
    except (DatabaseError, ValidationError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _interrupts_left_to_child() -> Iterator[None]:
    """Ctrl-C in a SQL prompt cancels the query; it must not end us, who may be running the server."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
