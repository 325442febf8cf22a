"""The service from Python."""

from __future__ import annotations

import http.server
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import yaml
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from database.engine import create_engine
from longlaw import Client
from longlaw.errors import ApiProblem, LonglawError, ServiceUnreachableError, WaitTimeoutError
from tests.api import seeding, seeding_measures
from tests.longlaw.conftest import Finished


@pytest.fixture
def client(service: str) -> Iterator[Client]:
    with Client(service) as client:
        yield client


@pytest.fixture
def reader(finished: Finished) -> Iterator[Client]:
    with Client(finished.url) as client:
        yield client


def test_grid_goes_from_plan_to_end(client: Client, database_url: str) -> None:
    assert client.plan(seeding.document())["cells"] == 4
    created = client.submit(yaml.safe_dump(seeding.document()))
    assert [grid.id for grid in client.grids()] == [created.id]
    assert client.grid(created.id).state == "PENDING"
    with pytest.raises(WaitTimeoutError, match="still PENDING"):
        client.wait(created.id, timeout_s=0, every_s=0.01)
    engine = create_engine(database_url)
    seen: list[str] = []
    for grid in client.watch(created.id, every_s=0.01):
        seen.append(grid.state)
        if len(seen) == 1:
            with Session(engine) as session, session.begin():
                seeding.finish(session)
    engine.dispose()
    assert seen == ["PENDING", "SUCCEEDED"]
    assert client.wait(created.id).cells["MEASURED"] == 4


def test_everything_that_was_measured_comes_back_typed(reader: Client, finished: Finished) -> None:
    cells = list(reader.cells(finished.grid_id))
    rows = list(reader.observations(grid=finished.grid_id))
    assert len(cells) == len(rows) == 8
    assert {cell.evaluations[0].log_longppl for cell in cells} == {row.log_longppl for row in rows}
    assert all(row.created_at.utcoffset() is not None for row in rows)
    assert [series.id for series in reader.series()] == [finished.series_id]
    assert [fit.id for fit in reader.fits(series=finished.series_id)] == [finished.fit_id]
    assert len(reader.fit(finished.fit_id).observations) == 8
    assert list(reader.observations(scale="no")) == []


def test_lists_are_followed_over_their_pages(
    reader: Client, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(reader.observations())
    monkeypatch.setattr("longlaw.client.PAGE_SIZE", 3)
    assert list(reader.observations()) == whole


def test_one_point_and_many_are_predicted_alike(reader: Client) -> None:
    many = reader.predict(n_params=5e4, short_tokens=2000, long_tokens=[600, 900]).predictions
    one = reader.predict(n_params=5e4, short_tokens=2000, long_tokens=900).predictions
    assert one == many[1:]


def test_arrays_are_predicted_as_a_table_with_the_same_numbers(reader: Client, finished: Finished) -> None:
    short, long = (axis.ravel() for axis in np.meshgrid([2000, 1e4], np.geomspace(100, 1e6, 7)))
    frame = reader.predict_frame(n_params=5e4, short_tokens=short, long_tokens=long)
    points = reader.predict(n_params=5e4, short_tokens=short, long_tokens=long).predictions
    assert frame.attrs == {"fit_id": finished.fit_id}
    assert frame["log_longppl"].tolist() == [point.log_longppl for point in points]
    assert frame["extrapolation_long_tokens"].tolist() == [point.extrapolation.long_tokens for point in points]
    assert frame["warnings"].tolist() == [" | ".join(point.warnings) for point in points]
    assert frame["determined"].tolist() == [point.determined for point in points]
    assert frame["low"].isna().all()  # no draws: withheld, and still a column of numbers
    assert {str(kind) for kind in frame.dtypes[:-2]} == {"float64"}


@pytest.mark.parametrize("sizes", [["1e9"], [[1e9, 2e9]], [True], [None]])
def test_sizes_that_are_no_flat_list_of_numbers_are_named(client: Client, sizes: Any) -> None:
    with pytest.raises(LonglawError, match="long_tokens must be a number or a flat list of numbers"):
        client.predict_frame(n_params=1e8, short_tokens=1e9, long_tokens=sizes)


@pytest.mark.parametrize("field", ["n_params", "short_tokens", "long_tokens", "level"])
def test_a_number_that_json_cannot_hold_is_named(client: Client, field: str) -> None:
    asked = {"n_params": 1e8, "short_tokens": 1e9, "long_tokens": [1e9, 2e9], "level": 0.9}
    with pytest.raises(LonglawError, match=f"{field} is nan"):
        client.predict(**{**asked, field: math.nan})  # type: ignore[arg-type]


def test_refusal_carries_title_detail_and_places(client: Client) -> None:
    with pytest.raises(ApiProblem) as raised:
        client.submit(seeding.document(short_tokens=[0], protcol="constant"))
    problem = raised.value
    assert problem.status == 422
    assert problem.type == "urn:longlaw:problem:invalid-grid"
    assert {place.where for place in problem.places} >= {"/short_tokens/0", "/protcol"}
    assert "/protcol" in str(problem)


def test_how_training_went_and_what_probes_found_come_back_typed(
    client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(engine) as session, session.begin():
        grid_id = str(seeding.submit_grid(session).grid_id)
        seeding.finish(session, health=seeding_measures.health, probes=seeding_measures.probes)
    segments, numbers = list(client.training(grid_id)), list(client.metrics(grid_id))
    assert {segment.kind for segment in segments} == {"short_trunk", "short_decay", "long_constant"}
    assert all(segment.points[-1].loss > 2 for segment in segments)
    assert len({number.evaluation_id for number in numbers}) == 4
    monkeypatch.setattr("longlaw.client.PAGE_SIZE", 7)
    monkeypatch.setattr("longlaw.client._SEGMENTS", 1)
    assert list(client.training(grid_id)) == segments
    heads = list(client.metrics(grid_id, metric="retrieval_heads", scale="d64"))
    assert heads == [row for row in numbers if row.metric == "retrieval_heads" and row.scale == "d64"] != []
    assert list(client.training(grid_id, scale="no")) == []


@pytest.mark.parametrize("grid_id", ["../series", "x", ""])
def test_what_is_no_id_leads_nowhere(client: Client, grid_id: str) -> None:
    with pytest.raises(ApiProblem, match="no id"):
        client.grid(grid_id)


def test_unreachable_service_is_named_with_the_way_out() -> None:
    with Client("http://127.0.0.1:9", patience_s=0) as client, pytest.raises(ServiceUnreachableError) as raised:
        client.submit(seeding.document())
    assert "http://127.0.0.1:9" in str(raised.value)
    assert "longlaw up" in str(raised.value)


def test_other_program_on_the_port_is_told_apart() -> None:
    with (
        _serving(http.server.BaseHTTPRequestHandler) as url,
        Client(url) as client,
        pytest.raises(ApiProblem, match="501"),
    ):
        client.series()


def test_a_friendly_answer_of_another_program_is_told_apart_too() -> None:
    with _serving(_Welcome) as url, Client(url) as client:
        calls = (client.series, lambda: next(client.grids()), lambda: client.plan({}), lambda: client.submit({}))
        for call in calls:
            with pytest.raises(ApiProblem, match="Not an answer of Longlaw"):
                call()


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:port", "not-a-url"])
def test_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ServiceUnreachableError, match=re.escape(url)):
        Client(url, patience_s=60).series()


def test_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, finished: Finished) -> None:
    monkeypatch.setenv("LONGLAW_URL", finished.url + "/")
    with Client() as client:
        assert client.grid(finished.grid_id).name == "small"


def test_package_imports_nothing_heavy_until_it_is_asked() -> None:
    program = (
        "import sys, longlaw; assert not {'numpy', 'httpx', 'pydantic'} & set(sys.modules);"
        "from longlaw import Client, fit, data_commands;"
        "assert not {'torch', 'fastapi', 'ray', 'sqlalchemy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class _serving:
    """Runs a handler's server for a block and yields its URL."""

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> str:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _Welcome(http.server.BaseHTTPRequestHandler):
    """Answers everything with a page."""

    def do_GET(self) -> None:
        page = b"<h1>It works!</h1>"
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
