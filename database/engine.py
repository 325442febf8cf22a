"""How every process connects: one driver, time in UTC, dead connections replaced, passwords never shown."""

from sqlalchemy import URL, Engine, Pool, make_url, text
from sqlalchemy import create_engine as sqlalchemy_create_engine
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from database.errors import DatabaseUnavailableError, DatabaseUrlError

_DRIVER = "postgresql+psycopg"
#: Results lie in memory or on flash, where a random page costs about as much as the next one: by the default of 4 the
#: planner reads whole tables for a page of a list. Compiling such statements takes longer than running them.
_PLANNING = "-c random_page_cost=1.1 -c jit=off"


def parse_url(url: str | URL) -> URL:
    """Returns `url` for SQLAlchemy with the psycopg driver; `postgres://` and `postgresql://` are both read.

    Raises:
        DatabaseUrlError: unreadable, or not Postgres.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseUrlError(
            "The database URL cannot be read; it looks like postgresql://USER:PASSWORD@HOST:5432/NAME, with special "
            "characters of the password percent-encoded."
        ) from None
    dialect = parsed.drivername.split("+")[0]
    if dialect not in ("postgres", "postgresql"):
        raise DatabaseUrlError(f"Longlaw keeps its results in Postgres alone, not in {dialect!r}.")
    return parsed.set(drivername=_DRIVER)


def redact(url: str | URL) -> str:
    """Returns `url` with its password replaced by `***`, fit to be printed."""
    try:
        parsed = parse_url(url)
    except DatabaseUrlError:
        return "<unreadable database URL>"
    hidden = {name: "***" for name in parsed.query if "password" in name}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True)


def create_engine(
    url: str | URL,
    *,
    application_name: str = "longlaw",
    pool_size: int = 5,
    max_overflow: int = 10,
    pool_timeout_s: float = 10.0,
    connect_timeout_s: int = 10,
    poolclass: type[Pool] | None = None,
) -> Engine:
    """Returns an engine on `url`. Nothing connects yet.

    Pooled connections are tried before use, so that a server that was restarted costs its clients no failed call.

    Args:
        url: any Postgres URL that `parse_url` reads.
        application_name: what the server's `pg_stat_activity` shows for our connections.
        pool_size: connections kept open.
        max_overflow: connections beyond `pool_size` under load.
        pool_timeout_s: how long a caller waits for a connection when all are busy.
        connect_timeout_s: how long to wait for a server that does not answer.
        poolclass: another kind of pool (`NullPool` for one-off work); the sizes are then not used.

    Raises:
        DatabaseUrlError: see `parse_url`.
    """
    parsed = parse_url(url)
    given = parsed.query.get("options", "")
    options = given if isinstance(given, str) else " ".join(given)
    connect_args = {
        "application_name": application_name,
        "connect_timeout": connect_timeout_s,
        "options": f"{options} -c timezone=UTC {_PLANNING}".strip(),
    }
    if poolclass is not None:
        return sqlalchemy_create_engine(parsed, connect_args=connect_args, poolclass=poolclass)
    return sqlalchemy_create_engine(
        parsed,
        connect_args=connect_args,
        pool_pre_ping=True,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_timeout=pool_timeout_s,
    )


def session_factory(engine: Engine) -> sessionmaker[Session]:
    """Returns a maker of sessions; rows stay readable after the commit that ends a session."""
    return sessionmaker(engine, expire_on_commit=False)


def check_available(engine: Engine) -> None:
    """Asks the server for a sign of life.

    Raises:
        DatabaseUnavailableError: it does not answer, or refuses us.
    """
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
    except OperationalError as error:
        raise DatabaseUnavailableError(f"{redact(engine.url)} does not answer: {error.orig}") from error
