"""Observations over HTTP: to the last bit, page by page, also while rows arrive."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from database.models import Evaluator, Observation, Series
from tests.api.conftest import Measured

_VALUES = {
    "scale": "s",
    "n_params": 2**53 + 1,
    "short_tokens": 370_000_000_000,
    "long_tokens": 1,
    "short_seed": 0,
    "long_seed": 0,
    "cluster": "c",
    "source": "run",
}


@pytest.fixture
def series(sessions: sessionmaker[Session]) -> str:
    with sessions.begin() as session:
        session.add(Evaluator(id="e", spec={}))
        session.flush()
        for name in ("s", "other"):
            session.add(
                Series(
                    id=name,
                    family="f",
                    protocol="constant",
                    rule="raw",
                    evaluator_id="e",
                    metric="log_longppl",
                    label=name,
                )
            )
    return "s"


def _add(sessions: sessionmaker[Session], series: str, *values: float, **changes: Any) -> None:
    with sessions.begin() as session:
        session.add_all([Observation(series_id=series, y=y, **_VALUES | changes) for y in values])


def test_numbers_come_back_to_the_last_bit(http: httpx.Client, sessions: sessionmaker[Session], series: str) -> None:
    """B95, B109: doubles in their shortest form, counts above 2^53 untouched, ids as text."""
    _add(sessions, series, 2.3456789012345, 0.1 + 0.2, -1e-300)
    answer = http.get("/v1/observations")
    rows = answer.json()["items"]
    assert [row["log_longppl"] for row in rows] == [2.3456789012345, 0.1 + 0.2, -1e-300]
    assert "2.3456789012345," in answer.text
    assert {row["n_params"] for row in rows} == {9007199254740993}
    assert all(isinstance(row["id"], str) for row in rows)


def test_time_is_utc_whatever_the_session_says(
    http: httpx.Client, sessions: sessionmaker[Session], engine: Engine, series: str
) -> None:
    """B124: 10:00 in Berlin's winter is 09:00 UTC."""
    with engine.begin() as connection:
        connection.execute(text("SET timezone = 'Europe/Berlin'"))
        connection.execute(
            text(
                "INSERT INTO observations (series_id, scale, n_params, short_tokens, long_tokens, short_seed,"
                "                          long_seed, cluster, y, source, created_at)"
                " VALUES ('s', 's', 1, 1, 1, 0, 0, 'c', 1, 'imported', '2026-01-15 10:00')"
            )
        )
    assert http.get("/v1/observations").json()["items"][0]["created_at"] == "2026-01-15T09:00:00Z"


def test_pages_hold_every_row_once_though_the_sort_key_ties(
    http: httpx.Client, sessions: sessionmaker[Session], series: str
) -> None:
    """B120: 250 rows, 120 of them equal, five full pages."""
    _add(sessions, series, *[1.5] * 120, *[float(n % 7) for n in range(130)])
    seen: list[tuple[float, int]] = []
    cursor: str | None = None
    for _ in range(5):
        page = _page(http, sort="log_longppl", cursor=cursor)
        assert len(page["items"]) == 50
        seen += [(row["log_longppl"], int(row["id"])) for row in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert seen == sorted(seen)
    assert len(set(seen)) == 250


@pytest.mark.parametrize("sort", ["id", "log_longppl"])
def test_rows_that_arrive_while_paging_lose_and_double_nothing(
    http: httpx.Client, sessions: sessionmaker[Session], series: str, sort: str
) -> None:
    """B120."""
    _add(sessions, series, *[float(n % 5) for n in range(120)])
    before = {row["id"] for row in _all(http, sort=sort)}
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = _page(http, sort=sort, cursor=cursor)
        seen += [row["id"] for row in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        _add(sessions, series, *[float(n) for n in range(5)])
    assert len(seen) == len(set(seen))
    assert before <= set(seen)


def test_filters_select_and_are_bound_into_the_cursor(
    http: httpx.Client, sessions: sessionmaker[Session], series: str
) -> None:
    _add(sessions, series, *[1.0] * 3, scale="small")
    _add(sessions, series, *[2.0] * 3, scale="large")
    _add(sessions, "other", 3.0)
    assert {row["log_longppl"] for row in _all(http, scale="large")} == {2.0}
    assert {row["log_longppl"] for row in _all(http, series="other")} == {3.0}
    cursor = _page(http, scale="small", limit=2)["next_cursor"]
    assert len(_page(http, scale="small", limit=2, cursor=cursor)["items"]) == 1
    for other in ({"scale": "large"}, {}, {"scale": "small", "sort": "log_longppl"}):
        answer = http.get("/v1/observations", params={"cursor": cursor, **other})
        assert answer.status_code == 422
        assert answer.json()["type"] == "urn:longlaw:problem:invalid-cursor"


@pytest.mark.parametrize("cursor", ["x", "%00", "W10", "bnVsbA", "WyJhIiwxXQ", "é", "A" * 1000, "WzEsMiwz"])
@pytest.mark.parametrize("path", ["/v1/observations", "/v1/fits", "/v1/grids"])
def test_damaged_cursor_is_refused(reader: httpx.Client, path: str, cursor: str) -> None:
    answer = reader.get(path, params={"cursor": cursor})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:longlaw:problem:invalid-cursor"


def test_grid_filter_names_what_its_cells_asked_for(reader: httpx.Client, measured: Measured) -> None:
    assert len(_all(reader, grid=measured.grid_id)) == 36
    assert _all(reader, grid="00000000-0000-0000-0000-000000000000") == []


def test_series_counts_its_rows_and_names_its_latest_fit(reader: httpx.Client, measured: Measured) -> None:
    (series,) = reader.get("/v1/series").json()["items"]
    assert series["observations"] == 36
    assert (series["id"], series["latest_fit_id"]) == (measured.series_id, measured.fit_id)
    assert series["metric"] == "log_longppl"


def test_table_exports_as_csv(http: httpx.Client, sessions: sessionmaker[Session], series: str) -> None:
    """B113, B95: text that a spreadsheet would run is made inert, numbers are left alone, also negative ones."""
    names = ["=1+1", "@SUM(A1)", "+1", "\t=1", "-2", 'plain, with "quotes"\nand lines']
    for name in names:
        _add(sessions, series, -0.1, scale=name)
    answer = http.get("/v1/observations", headers={"Accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = _csv(answer.text)
    assert [row["scale"] for row in rows] == [*("'" + name for name in names[:5]), names[5]]
    assert {row["log_longppl"] for row in rows} == {"-0.1"}
    assert {row["n_params"] for row in rows} == {"9007199254740993"}


def test_csv_has_all_rows_whatever_the_page_size(
    http: httpx.Client, sessions: sessionmaker[Session], series: str
) -> None:
    _add(sessions, series, *[float(n) for n in range(1345)])
    rows = _csv(http.get("/v1/observations", headers={"Accept": "text/csv"}).text)
    assert [float(row["log_longppl"]) for row in rows] == [float(n) for n in range(1345)]


def test_answers_are_strict_json(reader: httpx.Client) -> None:
    """B103."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    for path in ("/v1/observations", "/v1/fits", "/v1/grids", "/v1/series"):
        json.loads(reader.get(path).text, parse_constant=refuse)


def _page(http: httpx.Client, **parameters: Any) -> dict[str, Any]:
    answer = http.get("/v1/observations", params={k: v for k, v in parameters.items() if v is not None})
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def _all(http: httpx.Client, **parameters: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = _page(http, limit=1000, **parameters)["items"]
    return items


def _csv(content: str) -> list[dict[str, str]]:

    return list(csv.DictReader(io.StringIO(content)))


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/v1/observations?serie=s", "serie"),
        ("/v1/observations?series=s&scale=%00", "scale"),
        ("/v1/fits?series=a%00b", "series"),
        ("/v1/series?limit=5", "limit"),
        ("/v1/grids?state=RUNNING", "state"),
        ("/healthz?x", "x"),
    ],
)
def test_a_filter_that_cannot_hold_is_refused_rather_than_ignored(
    http: httpx.Client, path: str, parameter: str
) -> None:
    answer = http.get(path)
    assert answer.status_code == 422
    assert [item["parameter"] for item in answer.json()["errors"]] == [parameter]
