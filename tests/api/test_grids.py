"""Planning and submitting grids over HTTP."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session, sessionmaker

from database.idempotency import hold_key
from database.models import Grid
from orchestrator.grid_file import MAX_DOCUMENT_BYTES
from tests.api.seeding import document

YAML = {"Content-Type": "application/yaml"}


def test_plan_prices_a_grid_and_stores_nothing(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    answer = http.post("/v1/grids:plan", json=document())
    assert answer.status_code == 200
    plan = answer.json()
    assert plan["cells"] == 4
    assert len(plan["cells_detail"]) == 4
    assert {cell["status"] for cell in plan["cells_detail"]} == {"new"}
    assert 0 < plan["tokens"]["train"] < plan["tokens"]["independent"]
    assert _grids(sessions) == 0


def test_yaml_and_json_plan_alike(reader: httpx.Client) -> None:
    as_yaml = reader.post("/v1/grids:plan", content=yaml.safe_dump(document(), sort_keys=False), headers=YAML)
    assert as_yaml.json() == reader.post("/v1/grids:plan", json=document()).json()


def test_submitted_grid_is_created_and_its_plan_becomes_reuse(http: httpx.Client) -> None:
    answer = http.post("/v1/grids", json=document())
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/grids/{answer.json()['id']}"
    assert http.get(answer.headers["location"]).json()["cells"]["PENDING"] == 4
    again = http.post("/v1/grids:plan", json=document()).json()
    assert again["tokens"]["train"] == 0
    assert {cell["status"] for cell in again["cells_detail"]} == {"in_flight"}


@pytest.mark.parametrize("written", ["[1728, 1728.0, 1_728, 1.728e3, 1.728E+3]", '["1728", 1728]'])
def test_numbers_may_be_written_in_any_way(reader: httpx.Client, written: str) -> None:
    """B87, B106: one number is one cell, whatever its spelling."""
    grid = yaml.safe_dump(document(short_tokens="HERE")).replace("HERE", written)
    plan = reader.post("/v1/grids:plan", content=grid, headers=YAML).json()
    assert {cell["short_tokens"] for cell in plan["cells_detail"]} == {1728}
    assert plan["cells"] == 4
    assert any(warning["pointer"].startswith("/short_tokens") for warning in plan["warnings"])


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"protocl": "constant"}, "/protocl"),
        ({"short_tokens": [0, 1728]}, "/short_tokens/0"),
        ({"short_tokens": [1.5]}, "/short_tokens/0"),
        ({"scales": {"odd": {"layers": 1, "width": 32, "heads": 3, "ffn_width": 32}}}, "/scales/odd/heads"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/grids", "/v1/grids:plan"])
def test_wrong_grid_is_refused_with_its_place(
    reader: httpx.Client, path: str, change: dict[str, Any], pointer: str
) -> None:
    answer = reader.post(path, json=document(**change))
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:longlaw:problem:invalid-grid"
    assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert _only_the_seeded_grid(reader)


def test_grid_with_too_many_cells_is_refused_with_the_maximum(reader: httpx.Client) -> None:
    answer = reader.post("/v1/grids", json=document(seeds={"short": list(range(400)), "long": list(range(400))}))
    assert answer.status_code == 422
    assert "200,000 at most" in answer.json()["detail"]


def test_number_that_is_none_is_refused(reader: httpx.Client) -> None:
    body = json.dumps(document(short_tokens=[float("nan")]))
    answer = reader.post("/v1/grids", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert "NaN" in answer.json()["detail"]


def test_corpus_must_be_named_by_its_hash(reader: httpx.Client) -> None:
    grid = document()
    grid["recipe"] = {**grid["recipe"], "corpus": "../../etc/passwd"}
    (warning,) = reader.post("/v1/grids:plan", json=grid).json()["warnings"]  # priced, as if nothing of it existed
    assert warning["pointer"] == "/recipe/corpus"
    answer = reader.post("/v1/grids", json=grid)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == "urn:longlaw:problem:corpus-not-resolved"
    assert "longlaw data build" in problem["detail"]
    assert problem["errors"][0]["pointer"] == "/recipe/corpus"
    assert _only_the_seeded_grid(reader)


@pytest.mark.parametrize("name", ["Größe/实验 №1", "a:b", "x (3, 4)", " trailing. ", "=1+1", "../../b"])
def test_names_are_kept_to_the_letter(http: httpx.Client, name: str) -> None:
    """B90: a name is data; no path and no address is made of it."""
    created = http.post("/v1/grids", json=document(name=name)).json()
    assert http.get(f"/v1/grids/{created['id']}").json()["name"] == name


def test_overlong_name_is_refused(reader: httpx.Client) -> None:
    """B90."""
    assert reader.post("/v1/grids", json=document(name="x" * 300)).status_code == 422


def test_alias_bomb_is_refused_without_going_off(reader: httpx.Client) -> None:
    """B110: 9^9 leaves in a few hundred bytes."""
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    answer = reader.post("/v1/grids:plan", content="\n".join(levels), headers=YAML)
    assert answer.status_code == 422
    assert "aliases" in answer.json()["detail"]
    assert reader.get("/healthz").status_code == 200


def test_body_above_the_limit_is_refused(reader: httpx.Client) -> None:
    for content in (
        b"#" * (MAX_DOCUMENT_BYTES + 1),
        iter([b"#" * (MAX_DOCUMENT_BYTES // 2)] * 3),
    ):  # with its length announced, and without
        answer = reader.post("/v1/grids", content=content, headers=YAML)
        assert answer.status_code == 413
        assert answer.json()["type"] == "urn:longlaw:problem:body-too-large"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_types_of_body_are_refused(reader: httpx.Client, kind: str) -> None:
    """A web page elsewhere can make a browser send these without asking us first."""
    answer = reader.post("/v1/grids", content=b"{}", headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert answer.json()["type"] == "urn:longlaw:problem:unsupported-media-type"


def test_repeated_key_makes_one_grid(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    """B85: six times the same request, one grid, the same answer."""
    answers = [http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"}) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [201] * 6
    assert len({answer.text for answer in answers}) == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, *["true"] * 5]
    assert _grids(sessions) == 1


def test_key_does_not_mind_how_numbers_are_written(http: httpx.Client) -> None:
    """B87."""
    first = http.post("/v1/grids", json=document(short_tokens=[1728]), headers={"Idempotency-Key": "k"})
    second = http.post("/v1/grids", json=document(short_tokens=["1.728e3"]), headers={"Idempotency-Key": "k"})
    assert second.json()["id"] == first.json()["id"]


def test_key_with_another_grid_is_refused(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"})
    answer = http.post("/v1/grids", json=document(name="other"), headers={"Idempotency-Key": "k"})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:longlaw:problem:idempotency-key-reused"
    assert _grids(sessions) == 1


def test_key_of_a_running_request_is_busy(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        assert hold_key(session, "k")
        answer = http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"})
        assert answer.status_code == 409
        assert answer.headers["retry-after"] == "1"
        session.rollback()
    assert http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"}).status_code == 201


def test_concurrent_requests_with_one_key_make_one_grid(url: str, sessions: sessionmaker[Session]) -> None:
    """B85."""
    start = threading.Barrier(6)

    def post(_: int) -> httpx.Response:
        start.wait()
        while True:
            answer = httpx.post(
                f"{url}/v1/grids", json=document(), headers={"Idempotency-Key": "k"}, timeout=60, trust_env=False
            )
            if answer.status_code != 409:
                return answer
            time.sleep(0.05)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(post, range(6)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert _grids(sessions) == 1


def test_failed_submission_keeps_no_key(http: httpx.Client, sessions: sessionmaker[Session], engine: Engine) -> None:
    """The key is stored with the grid or not at all."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE idempotency_keys ADD CONSTRAINT no CHECK (false) NOT VALID"))
    assert http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"}).status_code == 500
    assert _grids(sessions) == 0
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE idempotency_keys DROP CONSTRAINT no"))
    assert http.post("/v1/grids", json=document(), headers={"Idempotency-Key": "k"}).status_code == 201


def test_document_comes_back_as_written_and_plans_again(http: httpx.Client) -> None:
    grid_id = http.post("/v1/grids", json=document(long_tokens=["5.12e2", 1024])).json()["id"]
    kept = http.get(f"/v1/grids/{grid_id}/document").json()
    assert kept["long_tokens"] == ["5.12e2", "1024"]
    assert kept.keys() == document().keys()
    assert http.post("/v1/grids:plan", json=kept).json()["tokens"]["train"] == 0
    assert http.get(f"/v1/grids/{uuid.UUID(int=0)}/document").status_code == 404


def test_list_is_newest_first_and_complete_over_pages(http: httpx.Client) -> None:
    made = [http.post("/v1/grids", json=document(name=f"g{n}")).json()["id"] for n in range(5)]
    seen: list[str] = []
    cursor: str | None = None
    for size in (2, 2, 1):
        page = http.get("/v1/grids", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        assert len(page["items"]) == size
        seen += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert seen == made[::-1]


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%252e%252e/", "a/../../b", "%2fetc%2fpasswd", "..%5c..", "0", "%00"]
)
@pytest.mark.parametrize("path", ["/v1/grids/{}", "/v1/grids/{}/cells", "/v1/fits/{}", "/{}"])
def test_paths_that_try_to_climb_lead_nowhere(reader: httpx.Client, path: str, name: str) -> None:
    """B111."""
    answer = reader.get(path.format(name))
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "root:" not in answer.text


def _grids(sessions: sessionmaker[Session]) -> int:
    with sessions() as session:
        return session.scalars(select(func.count()).select_from(Grid)).one()


def _only_the_seeded_grid(reader: httpx.Client) -> bool:
    return len(reader.get("/v1/grids").json()["items"]) == 1
