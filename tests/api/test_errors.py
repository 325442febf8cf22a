"""Everything that is not a success is a problem (RFC 9457), from one catalogue that the documentation repeats."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.exc import ResourceClosedError

import api.errors
from api.app import create_app
from api.errors import HTTP_PROBLEMS, PROBLEMS, TYPE_PREFIX, ApiError, problem_kind
from tests.api.conftest import serve

DOCS = Path(__file__).parents[2] / "docs" / "rest.md"
KINDS = {kind.slug: kind for kind in (*PROBLEMS.values(), *HTTP_PROBLEMS.values())}


def test_every_error_of_the_api_has_its_problem() -> None:
    named = [item for item in vars(api.errors).values() if isinstance(item, type) and issubclass(item, ApiError)]
    assert len(named) > 10
    for error in named:
        if error is not ApiError:
            assert error in PROBLEMS


def test_documentation_lists_exactly_the_catalogue() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", DOCS.read_text(), flags=re.MULTILINE)
    assert {slug: int(status) for slug, status in rows} == {slug: kind.status for slug, kind in KINDS.items()}


def test_one_slug_has_one_status_and_title() -> None:
    for kind in (*PROBLEMS.values(), *HTTP_PROBLEMS.values()):
        assert KINDS[kind.slug] == kind


def test_unknown_error_is_internal() -> None:
    assert problem_kind(ResourceClosedError()).slug == "internal"


@pytest.mark.parametrize(
    ("method", "path", "status", "slug"),
    [
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/v1/grids/", 404, "not-found"),
        ("GET", "/v1/grids/00000000-0000-0000-0000-000000000000", 404, "not-found"),
        ("GET", "/v1/grids/00000000-0000-0000-0000-000000000000/cells", 404, "not-found"),
        ("DELETE", "/v1/grids", 405, "method-not-allowed"),
        ("GET", "/v1/predictions", 405, "method-not-allowed"),
        ("POST", "/v1/grids", 415, "unsupported-media-type"),
        ("POST", "/v1/predictions", 415, "unsupported-media-type"),
        ("GET", "/v1/grids?limit=0", 422, "invalid-request"),
        ("GET", "/v1/observations?limit=1001", 422, "invalid-request"),
        ("GET", "/v1/observations?grid=x", 422, "invalid-request"),
        ("GET", "/v1/fits?cursor=!", 422, "invalid-cursor"),
    ],
)
def test_errors_are_problems(reader: httpx.Client, method: str, path: str, status: int, slug: str) -> None:
    answer = reader.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == TYPE_PREFIX + slug
    assert problem["status"] == status
    assert problem["title"] == KINDS[slug].title
    assert problem["detail"]


def test_method_not_allowed_says_what_is(reader: httpx.Client) -> None:
    assert reader.delete("/v1/fits").headers["allow"] == "GET, HEAD"
    assert reader.delete("/v1/grids").headers["allow"] == "GET, HEAD, POST"
    assert reader.get("/v1/predictions").headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/grids", "/openapi.json", "/v1/fits?limit=0"])
def test_head_has_the_headers_of_get_and_no_body(reader: httpx.Client, path: str) -> None:
    answers = [reader.request(method, path) for method in ("HEAD", "GET")]
    assert [len(answer.content) > 0 for answer in answers] == [False, True]
    assert answers[0].status_code == answers[1].status_code
    for name in ("content-type", "content-length", "cache-control"):
        assert answers[0].headers.get(name) == answers[1].headers.get(name)
    assert reader.request("HEAD", "/v1/predictions").status_code == 405


def test_a_parameter_given_twice_is_refused_rather_than_ignored(reader: httpx.Client) -> None:
    (first, second) = reader.get("/v1/fits?limit=10&limit=20").json()["errors"]
    assert first == second
    assert (first["parameter"], first["message"][:23]) == ("limit", "is given more than once")


def test_wrong_parameter_is_named(reader: httpx.Client) -> None:
    (place,) = reader.get("/v1/grids?limit=many").json()["errors"]
    assert place["parameter"] == "limit"


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"\xff\xfe", 400), (b"[]", 422), (b"null", 422)])
def test_body_that_is_no_request(reader: httpx.Client, content: bytes, status: int) -> None:
    answer = reader.post("/v1/predictions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"null", b"1", b'{"name": "\\ud800"}', b'{"a":1,"a":2}'])
def test_body_that_is_no_grid(reader: httpx.Client, content: bytes) -> None:
    answer = reader.post("/v1/grids:plan", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_fault_of_ours_tells_no_secret_and_the_server_lives_on(engine: Engine) -> None:
    """B115: what went wrong is for the log; the answer holds no trace of it."""
    app: FastAPI = create_app(engine)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("postgresql://longlaw:S3cr3tPw@db/longlaw")

    with serve(app) as url, httpx.Client(base_url=url, trust_env=False) as http:
        answer = http.get("/broken")
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == TYPE_PREFIX + "internal"
        for word in ("S3cr3tPw", "Traceback", "RuntimeError", ".py"):
            assert word not in answer.text
        assert http.get("/healthz").status_code == 200
