"""How training went and what probes found, over HTTP: complete, in order, page by page."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from sqlalchemy.orm import Session, sessionmaker

from database.attempts import renew
from database.measures import MAX_POINTS, record_points
from tests.api import seeding
from tests.api.conftest import LookedAt
from tests.api.seeding_measures import DEPTHS, FOLLOW_UP, LENGTHS, RELEASED
from workers.results import HealthPoint, TrainProgress


@pytest.fixture
def watcher(looked_at: LookedAt) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=looked_at.url, timeout=30.0, trust_env=False) as http:
        yield http


def test_every_segment_of_a_trajectory_goes_on_where_its_parent_was_left(
    watcher: httpx.Client, looked_at: LookedAt
) -> None:
    items = _pages(watcher, looked_at, "training", limit=100)
    kinds = {"short_trunk": 2, "short_decay": 2, "long_constant": 3, "follow_up": 3}
    assert Counter(item["kind"] for item in items) == kinds
    seen: dict[str, dict[str, Any]] = {}
    for item in items:
        parent = seen.get(item["parent"])
        assert (parent is None) == (item["parent"] is None)  # parents come first
        before = 0 if parent is None else parent["tokens_before"] + item["parent_step"] * parent["tokens_per_step"]
        assert item["tokens_before"] == before
        assert (item["state"], item["live"]) == ("SUCCEEDED", None)
        assert [point["step"] for point in item["points"]] == list(range(1, len(item["points"]) + 1))
        seen[item["segment"]] = item
    (follow_up,) = (item for item in items if (item["kind"], item["scale"]) == ("follow_up", "d32"))
    assert follow_up["tokens_before"] == 27 * 64 + 64 * 64
    assert follow_up["points"][-1].keys() == {field.name for field in dataclasses.fields(HealthPoint)}


def test_pages_hold_every_segment_once(watcher: httpx.Client, looked_at: LookedAt) -> None:
    whole = _pages(watcher, looked_at, "training", limit=100)
    assert _pages(watcher, looked_at, "training", limit=3) == whole
    released = _pages(watcher, looked_at, "training", limit=1, scale=RELEASED)
    assert released == [item for item in whole if item["scale"] == RELEASED] != []
    assert _pages(watcher, looked_at, "training", scale="no") == []


def test_fewer_points_are_spread_from_the_first_to_the_last(watcher: httpx.Client, looked_at: LookedAt) -> None:
    whole = {item["segment"]: item["points"] for item in _pages(watcher, looked_at, "training")}
    for item in _pages(watcher, looked_at, "training", points=5):
        points = whole[item["segment"]]
        steps = [point["step"] for point in item["points"]]
        assert len(steps) == min(5, len(points))
        assert (steps[0], steps[-1]) == (1, len(points))
        assert max(b - a for a, b in itertools.pairwise(steps)) <= -(-len(points) // 4)
        assert all(point in points for point in item["points"])


def test_running_segment_says_where_it_is(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session, seeding.document(short_tokens=[64 * 64])).grid_id
        claimed = seeding.next_segment(session)
        assert claimed is not None
    (item,) = http.get(f"/v1/grids/{grid_id}/training").json()["items"]
    assert (item["segment"], item["state"], item["points"]) == (claimed.key, "RUNNING", [])
    with sessions.begin() as session:
        report = TrainProgress(step=7, stage_tokens=7 * 64, loss=3.25, learning_rate=0.1, tokens_per_s=99.0)
        assert renew(session, claimed.token, lease_s=60, progress=report)
    (item,) = http.get(f"/v1/grids/{grid_id}/training").json()["items"]
    assert item["live"] == {"step": 7, "loss": 3.25, "tokens_per_s": 99.0}


def test_norm_that_is_no_number_is_null(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    """B103: a gradient can overflow where the loss does not."""
    with sessions.begin() as session:
        grid_id = seeding.submit_grid(session).grid_id
        claimed = seeding.next_segment(session)
        assert claimed is not None
        point = HealthPoint(step=1, loss=3.0, gradient_norm=float("inf"), learning_rate=0.1, tokens_per_s=1.0)
        record_points(session, claimed.key, [point])
    (item,) = http.get(f"/v1/grids/{grid_id}/training").json()["items"]
    assert item["points"][0]["gradient_norm"] is None
    assert item["points"][0]["mfu"] is None


def test_numbers_of_probes_name_the_model_they_are_of(watcher: httpx.Client, looked_at: LookedAt) -> None:
    rows = _pages(watcher, looked_at, "metrics", limit=1000)
    per_model = 2 * len(LENGTHS) * len(DEPTHS) + 7 + 2
    assert len(rows) == 12 * per_model  # three scales, each at three D_l and after its follow-up
    assert len({row["evaluation_id"] for row in rows}) == 12
    assert {row["short_tokens"] for row in rows if row["scale"] == RELEASED} == {None}
    assert {row["short_tokens"] for row in rows if row["scale"] != RELEASED} == {27 * 64}
    assert Counter(row["follow_up"] for row in rows) == {None: 9 * per_model, FOLLOW_UP: 3 * per_model}
    (heads,) = (
        row
        for row in rows
        if (row["metric"], row["scale"], row["long_tokens"]) == ("retrieval_heads", "d64", 4096)
        and row["follow_up"] is None
    )
    assert (heads["value"], heads["count"], heads["length"], heads["depth"]) == (12.0, 160, 128, None)


def test_metrics_are_filtered_paged_and_exported_alike(watcher: httpx.Client, looked_at: LookedAt) -> None:
    chosen = {"metric": "passkey_accuracy", "scale": "d32"}
    rows = _pages(watcher, looked_at, "metrics", limit=7, **chosen)
    whole = _pages(watcher, looked_at, "metrics", limit=1000)
    assert rows == [row for row in whole if row["metric"] == "passkey_accuracy" and row["scale"] == "d32"]
    assert len(rows) == 4 * len(LENGTHS) * len(DEPTHS)
    assert _pages(watcher, looked_at, "metrics", metric="no") == []

    answer = watcher.get(_path(looked_at, "metrics"), params=chosen, headers={"Accept": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    table = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["id"], float(row["value"])) for row in table] == [(row["id"], row["value"]) for row in rows]
    assert table[0].keys() == rows[0].keys()


@pytest.mark.parametrize("name", ["training", "metrics"])
def test_grid_that_is_none_is_not_found(watcher: httpx.Client, name: str) -> None:
    for accept in ("application/json", "text/csv"):
        answer = watcher.get(f"/v1/grids/{uuid.UUID(int=0)}/{name}", headers={"Accept": accept})
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:longlaw:problem:not-found")


@pytest.mark.parametrize(
    ("name", "query", "parameter"),
    [
        ("training", "limit=101", "limit"),
        ("training", "points=1", "points"),
        ("training", f"points={MAX_POINTS + 1}", "points"),
        ("training", "metric=x", "metric"),
        ("metrics", "limit=1001", "limit"),
        ("metrics", "metric=a%00b", "metric"),
        ("metrics", "series=x", "series"),
    ],
)
def test_values_that_are_not_allowed_are_named(
    watcher: httpx.Client, looked_at: LookedAt, name: str, query: str, parameter: str
) -> None:
    answer = watcher.get(f"{_path(looked_at, name)}?{query}")
    assert answer.status_code == 422
    assert [item["parameter"] for item in answer.json()["errors"]] == [parameter]


@pytest.mark.parametrize("name", ["training", "metrics"])
def test_cursor_is_bound_to_its_grid_and_filters(watcher: httpx.Client, looked_at: LookedAt, name: str) -> None:
    path = _path(looked_at, name)
    cursor = watcher.get(path, params={"limit": 1, "scale": "d32"}).json()["next_cursor"]
    assert watcher.get(path, params={"limit": 1, "scale": "d32", "cursor": cursor}).status_code == 200
    other = f"/v1/grids/{uuid.UUID(int=0)}/{name}"
    for asked, scale in ((path, "d64"), (path, None), (other, "d32")):
        parameters = {"cursor": cursor} | ({} if scale is None else {"scale": scale})
        answer = watcher.get(asked, params=parameters)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:longlaw:problem:invalid-cursor")


@pytest.mark.parametrize("name", ["training", "metrics"])
def test_answers_fit_their_schemas(watcher: httpx.Client, looked_at: LookedAt, name: str) -> None:
    contract = watcher.get("/openapi.json").json()
    answers = contract["paths"][f"/v1/grids/{{grid_id}}/{name}"]["get"]["responses"]
    schema = answers["200"]["content"]["application/json"]["schema"]
    body = watcher.get(_path(looked_at, name)).text
    jsonschema.validate(json.loads(body), {**schema, "components": contract["components"]})


def _path(looked_at: LookedAt, name: str) -> str:
    return f"/v1/grids/{looked_at.grid_id}/{name}"


def _pages(http: httpx.Client, looked_at: LookedAt, name: str, **parameters: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        asked = parameters | ({} if cursor is None else {"cursor": cursor})
        answer = http.get(_path(looked_at, name), params=asked)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        items += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return items
