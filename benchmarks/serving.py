"""How long every list and detail takes in a database of 100,000 checkpoints and 1,000,000 evaluations.

``python -m benchmarks.serving [--json] [--share 0.1]`` prints and writes nothing; it starts a database server and an
API of its own. ``--share`` (0.05 at least) makes the database smaller: it takes some minutes to fill, and 5 GB. CPU
time is of the API and the server together; wall time on a shared machine is worth what `/healthz`, which reads nothing,
says beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial

import httpx
import psutil
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, text

from benchmarks.serving_rows import fill
from database.embedded import scratch_postgres
from database.engine import create_engine
from database.migrate import upgrade

REPEATS = 6
CLIENTS, REQUESTS, REQUESTS_PER_S = 16, 400, 10.0


def made_up_id(name: str) -> str:
    """The id that `benchmarks.serving_rows` gives what has this name."""
    return str(uuid.UUID(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()))


LARGE, SMALL, HALF = (made_up_id(f"grid {number}") for number in (0, 7, 20))
_NAMES = {LARGE: "LARGE", SMALL: "SMALL", HALF: "HALF", made_up_id("fit 1"): "FIT"}
_OF_A_GRID = (
    "",
    "/document",
    "/cells",
    "/cells?limit=1000",
    "/training?points=50",
    "/training",
    "/training?scale=scale+1&points=50",
    "/metrics",
    "/metrics?metric=passkey_accuracy",
    "/metrics?scale=scale+1",
    "/metrics?metric=no",
)
_OBSERVATIONS = (
    "",
    "?limit=1000",
    "?sort=log_longppl",
    "?series=series+3",
    "?series=series+3&sort=log_longppl",
    "?scale=scale+1",
    "?scale=no",
    f"?grid={LARGE}",
    f"?grid={LARGE}&sort=log_longppl",
    f"?grid={LARGE}&series=series+0",
    f"?grid={LARGE}&series=series+3",
    f"?grid={SMALL}",
    f"?grid={SMALL}&series=series+3&sort=log_longppl",
)
PATHS = (
    "/healthz",
    "/readyz",
    "/v1/grids",
    "/v1/grids?limit=1000",
    *(f"/v1/grids/{grid}{rest}" for grid in (LARGE, SMALL, HALF) for rest in _OF_A_GRID),
    *(f"/v1/observations{rest}" for rest in _OBSERVATIONS),
    "/v1/series",
    "/v1/fits",
    "/v1/fits?limit=1000",
    "/v1/fits?series=series+3",
    "/v1/fits?state=FAILED",
    "/v1/fits?state=RUNNING",
    f"/v1/fits/{made_up_id('fit 1')}",
)
#: What a person who looks at one grid, and a dashboard that follows it, ask for.
_USUAL = (
    "/v1/grids",
    f"/v1/grids/{SMALL}",
    f"/v1/grids/{HALF}",
    f"/v1/grids/{LARGE}/cells",
    f"/v1/grids/{HALF}/cells",
    f"/v1/grids/{HALF}/training?points=50",
    f"/v1/grids/{SMALL}/metrics",
    "/v1/observations",
    f"/v1/observations?grid={SMALL}",
    "/v1/fits",
    f"/v1/fits/{made_up_id('fit 1')}",
)
VIEWS = (
    "SELECT * FROM research.grids",
    "SELECT name, cells_failed FROM research.grids ORDER BY created_at DESC LIMIT 20",
    f"SELECT * FROM research.grids WHERE grid_id = '{LARGE}'",  # noqa: S608 - an id of our own
    f"SELECT * FROM research.cells WHERE grid_id = '{SMALL}'",  # noqa: S608
    f"SELECT * FROM research.costs WHERE grid_id = '{SMALL}'",  # noqa: S608
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one request or statement: CPU of all who work for it, wall time, and the size of the answer."""

    what: str
    cpu_ms: float
    median_ms: float
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that come whether or not those before are answered, and the API's connections to the database."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p95_ms: float
    connections: int


class Clock:
    """CPU seconds of the server, of the processes that it began, and of others."""

    def __init__(self, engine: Engine, *others: int) -> None:
        with engine.connect() as connection:
            backend = psutil.Process(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        postmaster = backend.parent()
        assert postmaster is not None
        self._postmaster, self._others = postmaster, [psutil.Process(pid) for pid in others]

    def now_s(self) -> float:
        """Parallel workers come and go: their time is then with who began them."""
        ended = self._postmaster.cpu_times()
        total = ended.children_user + ended.children_system
        for process in (self._postmaster, *self._postmaster.children(recursive=True), *self._others):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


@contextmanager
def api(database_url: str) -> Iterator[tuple[httpx.Client, int]]:
    """Runs the API as a process of its own and yields a client of it, and its process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "LONGLAW_DATABASE_URL": database_url, "LONGLAW_API_PORT": str(port)}
    command = [sys.executable, "-m", "api"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False, limits=limits) as client:
            while not _answers(client):
                assert process.poll() is None, "the API ended"
                time.sleep(0.1)
            yield client, process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def timed(what: str, call: Callable[[], int | None], clock: Clock) -> Timing:
    """A call, once to warm up and then several times."""
    call()
    cpu_s, times = clock.now_s(), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        size_bytes = call()
        times.append((time.perf_counter() - began) * 1e3)
    cpu_ms = (clock.now_s() - cpu_s) / REPEATS * 1e3
    return Timing(what=_named(what), cpu_ms=cpu_ms, median_ms=statistics.median(times), size_bytes=size_bytes)


def requests(client: httpx.Client, clock: Clock) -> list[Timing]:
    """Every path."""

    def get(path: str) -> int:
        answer = client.get(path)
        answer.raise_for_status()
        return len(answer.content)

    return [timed(path, partial(get, path), clock) for path in PATHS]


def load(client: httpx.Client, engine: Engine) -> Load:
    """The usual requests, at a steady rate, each timed from when it was due."""
    chosen = random.Random(0).choices(_USUAL, k=REQUESTS)

    began = time.perf_counter()

    def ask(due_s: float, path: str) -> float:
        time.sleep(max(0.0, began + due_s - time.perf_counter()))
        client.get(path).raise_for_status()
        return (time.perf_counter() - began - due_s) * 1e3

    connections = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'longlaw-api'")
    watching = engine.execution_options(isolation_level="AUTOCOMMIT")  # a transaction would see one moment for ever
    with ThreadPoolExecutor(CLIENTS) as clients, watching.connect() as connection:
        waiting = [clients.submit(ask, number / REQUESTS_PER_S, path) for number, path in enumerate(chosen)]
        most = 0
        while not all(one.done() for one in waiting):
            most = max(most, connection.execute(connections).scalar_one())
            time.sleep(0.05)
        times = sorted(one.result() for one in waiting)
    return Load(
        requests=REQUESTS,
        requests_per_s=REQUESTS_PER_S,
        p50_ms=times[len(times) // 2],
        p95_ms=times[len(times) * 95 // 100],
        connections=most,
    )


def views(engine: Engine) -> list[Timing]:
    """Statements on the read contract."""

    def ask(statement: str) -> None:
        with engine.connect() as connection:
            connection.execute(text(statement)).all()

    clock = Clock(engine)
    return [timed(statement, partial(ask, statement), clock) for statement in VIEWS]


def _named(what: str) -> str:
    for found, name in _NAMES.items():
        what = what.replace(found, name)
    return what


def main() -> None:
    """Print the timings as tables, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows")
    given = parser.parse_args()
    with scratch_postgres() as database_url:
        upgrade(database_url)
        engine = create_engine(database_url, application_name="longlaw-benchmark")
        fill(engine, share=given.share)
        with api(database_url) as (client, pid):
            timings, loaded = requests(client, Clock(engine, pid)), load(client, engine)
        in_sql = views(engine)
        engine.dispose()
    if given.json:
        found = {"requests": timings, "views": in_sql}
        print(
            json.dumps(
                {name: [asdict(item) for item in items] for name, items in found.items()} | {"load": asdict(loaded)},
                indent=2,
            )
        )
        return
    shown = Table("request or statement", "CPU ms", "wall ms", "kB")
    for item in [*timings, *in_sql]:
        size = "" if item.size_bytes is None else f"{item.size_bytes / 1e3:,.0f}"
        shown.add_row(item.what, f"{item.cpu_ms:,.0f}", f"{item.median_ms:,.0f}", size)
    Console(width=130).print(shown)
    print(
        f"{loaded.requests} usual requests, {loaded.requests_per_s:g} a second: half within {loaded.p50_ms:.0f} ms, "
        f"95 % within {loaded.p95_ms:.0f} ms, {loaded.connections} connections to the database at most"
    )


if __name__ == "__main__":
    main()
