"""Connections: which URLs are read, what a session looks like, restarts, exhaustion, secrets."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, QueuePool, make_url, text
from sqlalchemy.exc import OperationalError

from database.embedded import EmbeddedPostgres, scratch_folder
from database.engine import check_available, create_engine, parse_url, redact, session_factory
from database.errors import DatabaseUnavailableError, DatabaseUrlError

PASSWORD = "S3cr3tPw"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_spelling_of_postgres_is_read_with_the_one_driver(scheme: str) -> None:
    url = parse_url(f"{scheme}://ada:{PASSWORD}@db.example:6543/laws?sslmode=require")
    assert url.render_as_string(hide_password=False) == (
        f"postgresql+psycopg://ada:{PASSWORD}@db.example:6543/laws?sslmode=require"
    )


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///laws.db", "Postgres alone, not in 'sqlite'"),
        (f"mysql://ada:{PASSWORD}@db/laws", "Postgres alone, not in 'mysql'"),
        (f"ada:{PASSWORD}@db/laws", "cannot be read"),
        (f"postgres://ada:{PASSWORD}@db:port/laws", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_anything_else_is_refused_without_repeating_the_password(url: str, says: str) -> None:
    with pytest.raises(DatabaseUrlError, match=says) as caught:
        create_engine(url)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgres://ada:{PASSWORD}@db/laws",
        f"postgresql://db/laws?user=ada&password={PASSWORD}&sslpassword={PASSWORD}",
        f"ada:{PASSWORD}@db",
        f"mysql://ada:{PASSWORD}@db",
    ],
)
def test_redacted_url_never_holds_the_password(url: str) -> None:
    assert PASSWORD not in redact(url)


def test_redacted_url_still_tells_where_the_database_is() -> None:
    assert redact("postgres://ada:x@db:6543/laws") == "postgresql+psycopg://ada:***@db:6543/laws"


def test_session_speaks_utc_and_gives_its_name_whatever_the_database_says(database_url: str) -> None:
    admin = create_engine(database_url)
    with admin.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {make_url(database_url).database} SET timezone TO 'Asia/Tokyo'"))
    admin.dispose()
    url = make_url(database_url).update_query_dict({"options": "-c work_mem=5MB"})
    engine = create_engine(url, application_name="longlaw-scheduler")
    with session_factory(engine)() as session:
        assert session.execute(text("SHOW timezone")).scalar_one() == "UTC"
        assert session.execute(text("SHOW application_name")).scalar_one() == "longlaw-scheduler"
        assert session.execute(text("SHOW work_mem")).scalar_one() == "5MB"
    engine.dispose()


def test_two_hundred_callers_share_fifteen_connections_and_return_them_all(database_url: str) -> None:
    """B97."""
    engine = create_engine(database_url, pool_size=5, max_overflow=10)

    def ask(number: int) -> int:
        with engine.connect() as connection:
            return int(
                connection.execute(
                    text("SELECT :number + 0 * length(pg_sleep(0.005)::text)"), {"number": number}
                ).scalar_one()
            )

    with ThreadPoolExecutor(40) as callers:
        assert list(callers.map(ask, range(200))) == list(range(200))
    assert isinstance(engine.pool, QueuePool)
    assert engine.pool.checkedout() == 0
    engine.dispose()


def test_first_call_after_a_server_restart_works(caplog: pytest.LogCaptureFixture) -> None:
    """B100, and B115 on the way."""
    caplog.set_level(logging.DEBUG)
    with scratch_folder() as folder, EmbeddedPostgres(folder / "postgres", options={"fsync": "off"}) as server:
        engine = create_engine(server.url, pool_size=2)
        first, second = engine.connect(), engine.connect()
        first.close()
        second.close()
        server.stop()
        server.start()
        for _ in range(3):
            with engine.connect() as connection:
                assert connection.execute(text("SELECT 1")).scalar_one() == 1
        server.stop()
        with pytest.raises(DatabaseUnavailableError) as caught:
            check_available(engine)
        engine.dispose()
        password = str(make_url(server.url).password)
    assert "***" in str(caught.value)
    assert password not in f"{caught.value} {caught.value.__cause__!r} {engine!r} {caplog.text}"


def test_refused_password_is_not_repeated_in_the_error(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """B115."""
    caplog.set_level(logging.DEBUG)
    wrong = create_engine(engine.url.set(password=PASSWORD))
    with pytest.raises(DatabaseUnavailableError, match="password authentication failed") as caught:
        check_available(wrong)
    assert isinstance(caught.value.__cause__, OperationalError)
    assert PASSWORD not in f"{caught.value} {caught.value.__cause__} {wrong!r} {caplog.text}"
