"""A migrated database that the tests of one module share, each in a transaction that is rolled back."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from database.engine import create_engine
from tests.conftest import MakeDatabase


@pytest.fixture(scope="module")
def shared_engine(migrated_database: MakeDatabase) -> Iterator[Engine]:
    """An engine on a database that stays empty: nothing is committed there."""
    with migrated_database() as url:
        engine = create_engine(url, application_name="longlaw-test")
        yield engine
        engine.dispose()


@pytest.fixture
def session(shared_engine: Engine) -> Iterator[Session]:
    """A session whose work is never committed."""
    with Session(shared_engine) as session:
        yield session
