"""Real Postgres for every test that asks: one server per session, migrated once, a fresh copy per test."""

import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, make_url, text

from database.embedded import scratch_folder, scratch_postgres
from database.engine import create_engine

MakeDatabase = Callable[[], AbstractContextManager[str]]

gc.disable()  # while everything is imported, which makes a million objects and no garbage


def pytest_collection_finish() -> None:
    """From here on garbage is collected, without a look at what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def reachable_tmp_path() -> Iterator[Path]:
    """A temporary folder that every user may enter, unlike `tmp_path`: an embedded server of root runs as `nobody`."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a server: that of LONGLAW_TEST_DATABASE_URL, else one of our own that ends with the session."""
    if url := os.environ.get("LONGLAW_TEST_DATABASE_URL"):
        yield url
    else:
        with scratch_postgres() as url:
            yield url


@pytest.fixture(scope="session")
def empty_database(postgres_url: str) -> MakeDatabase:
    """Makes databases without any table: `with empty_database() as url`."""
    return lambda: _database(postgres_url, template="template1")


@pytest.fixture(scope="session")
def migrated_database(postgres_url: str) -> Iterator[MakeDatabase]:
    """Makes migrated databases, for fixtures of a wider scope: `with migrated_database() as url`."""
    from database.migrate import upgrade

    with _database(postgres_url, template="template1") as template_url:
        upgrade(template_url)
        yield lambda: _database(postgres_url, template=str(make_url(template_url).database))


@pytest.fixture
def database_url(migrated_database: MakeDatabase) -> Iterator[str]:
    """The URL of a migrated database that this test has for itself."""
    with migrated_database() as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on `database_url`."""
    engine = create_engine(database_url, application_name="longlaw-test")
    yield engine
    engine.dispose()


@contextmanager
def _database(server_url: str, *, template: str) -> Iterator[str]:
    """Yields the URL of a new copy of `template`, dropped afterwards together with whoever is still connected."""
    name = f"longlaw_test_{secrets.token_hex(6)}"
    server = create_engine(server_url, poolclass=NullPool).execution_options(isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
