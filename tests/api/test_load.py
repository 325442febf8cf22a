"""Many readers at once: connections are borrowed for single transactions and all come back."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from sqlalchemy import Engine, QueuePool

from api.app import create_app
from database.engine import create_engine
from tests.api.conftest import serve


def test_200_parallel_readers_get_answers_and_leave_no_connection_behind(engine: Engine) -> None:
    """B97."""

    async def ask(url: str) -> Counter[int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as http:
            paths = ("/v1/grids", "/v1/observations", "/v1/fits", "/v1/series")
            answers = await asyncio.gather(*(http.get(paths[n % len(paths)]) for n in range(200)))
            return Counter(answer.status_code for answer in answers)

    with serve(create_app(engine)) as url:
        assert asyncio.run(ask(url)) == {200: 200}
        assert isinstance(engine.pool, QueuePool)
        assert engine.pool.checkedout() == 0


def test_exhausted_pool_is_overload_and_passes(database_url: str) -> None:
    """B97: who waits too long is told to come back, and does."""
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout_s=0.1)
    with serve(create_app(engine)) as url, httpx.Client(base_url=url, trust_env=False) as http:
        with engine.connect():
            answer = http.get("/v1/grids")
            assert answer.status_code == 503
            assert answer.json()["type"] == "urn:longlaw:problem:overloaded"
            assert answer.headers["retry-after"] == "1"
        assert http.get("/v1/grids").status_code == 200
    engine.dispose()
