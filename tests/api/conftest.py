"""A real server on a free loopback port, on a real database, for every test that asks."""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from api.app import create_app
from database.engine import create_engine, session_factory
from database.models import Fit
from tests.api import seeding, seeding_measures
from tests.conftest import MakeDatabase

#: Not used over HTTP; made once, since reading the certificates takes longer than most requests.
_TLS = ssl.create_default_context()


@functools.cache
def _document() -> dict[str, Any]:
    """The OpenAPI document: the same for every database, and 0.3 s of work, which the first request would have."""
    return create_app(create_engine("postgresql+psycopg://nobody@localhost/none")).openapi()


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Runs an application on a free port and yields its URL."""
    app.openapi_schema = _document()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    return session_factory(engine)


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    """The address of a service on this test's database."""
    with serve(create_app(engine)) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False, verify=_TLS) as http:
        yield http


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A service over a grid that was measured and fitted, for tests that only read."""

    url: str
    grid_id: str
    series_id: str
    fit_id: str
    holdout_fit_id: str
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """A service over a grid that was trained and probed, for tests that only read."""

    url: str
    grid_id: str
    engine: Engine


@pytest.fixture(scope="session")
def measured(migrated_database: MakeDatabase) -> Iterator[Measured]:
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            grid_id = str(seeding.submit_grid(session, seeding.fittable()).grid_id)
            seeding.finish(session)
            fits = {fit.holdout: fit for fit in (session.get_one(Fit, key) for key in seeding.fit_all(session))}
            series_id, fit_id = fits[None].series_id, str(fits[None].id)
            holdout_fit_id = str(fits["long_tokens=largest"].id)
        with serve(create_app(engine)) as url:
            yield Measured(
                url=url,
                grid_id=grid_id,
                series_id=series_id,
                fit_id=fit_id,
                holdout_fit_id=holdout_fit_id,
                engine=engine,
            )
        engine.dispose()


@pytest.fixture
def reader(measured: Measured) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=measured.url, timeout=30.0, trust_env=False, verify=_TLS) as reader:
        yield reader


@pytest.fixture(scope="session")
def looked_at(migrated_database: MakeDatabase) -> Iterator[LookedAt]:
    with migrated_database() as database_url:
        engine = create_engine(database_url, application_name="longlaw-test")
        with session_factory(engine).begin() as session:
            grid_id = str(seeding.submit_grid(session, seeding_measures.looked_at()).grid_id)
            seeding.finish(session, health=seeding_measures.health, probes=seeding_measures.probes)
        with serve(create_app(engine)) as url:
            yield LookedAt(url=url, grid_id=grid_id, engine=engine)
        engine.dispose()
