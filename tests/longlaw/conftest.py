"""A service for its clients: on an empty database, or on one that holds a measured and fitted grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine

from api.app import create_app
from database.engine import create_engine, session_factory
from tests.api import seeding
from tests.api.conftest import serve
from tests.conftest import MakeDatabase


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A service with one grid of eight measured cells, and its fit."""

    url: str
    grid_id: str
    fit_id: str
    series_id: str


@pytest.fixture
def service(engine: Engine) -> Iterator[str]:
    with serve(create_app(engine)) as url:
        yield url


@pytest.fixture(scope="package")
def finished(migrated_database: MakeDatabase) -> Iterator[Finished]:
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            grid = seeding.document(short_tokens=[1728, 3456], fit={"bootstrap": 0})
            submitted = seeding.submit_grid(session, grid)
            seeding.finish(session)
            (fit_id,) = seeding.fit_all(session)
        with serve(create_app(engine)) as url:
            yield Finished(
                url=url,
                grid_id=str(submitted.grid_id),
                fit_id=str(fit_id),
                series_id=submitted.plan.series[0].id,
            )
        engine.dispose()
