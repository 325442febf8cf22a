"""Whether the process lives, and whether it is ready: one answers without a database, the other tells what it lacks."""

from __future__ import annotations

import httpx
from sqlalchemy import Engine, NullPool, text

from api.app import create_app
from database.engine import create_engine
from database.migrate import head_revision
from tests.api.conftest import serve
from tests.conftest import MakeDatabase


def test_ready_service_names_its_revision_and_hides_its_password(http: httpx.Client, engine: Engine) -> None:
    answer = http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["revision"] == head_revision()
    assert engine.url.password is not None
    assert engine.url.password not in answer.text


def test_service_behind_head_is_alive_but_not_ready(empty_database: MakeDatabase) -> None:
    with empty_database() as url, serve(create_app(create_engine(url, poolclass=NullPool))) as service:
        assert httpx.get(f"{service}/healthz", trust_env=False).json()["status"] == "ok"
        answer = httpx.get(f"{service}/readyz", trust_env=False)
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:longlaw:problem:schema-mismatch"
    assert "longlaw db upgrade" in answer.json()["detail"]


def test_service_ahead_of_the_code_is_not_ready(engine: Engine, http: httpx.Client) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from-the-future'"))
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert "newer version" in answer.json()["detail"]


def test_service_without_database_says_503_everywhere_and_tells_no_secret() -> None:
    """B115: neither the password nor the address of the database leaves in an error."""
    engine = create_engine("postgresql://longlaw:S3cr3tPw@127.0.0.1:9/longlaw", connect_timeout_s=2)
    with serve(create_app(engine)) as service, httpx.Client(base_url=service, trust_env=False) as http:
        assert http.get("/healthz").status_code == 200
        answers = [http.get(path) for path in ("/readyz", "/v1/grids", "/v1/observations", "/v1/fits")]
    engine.dispose()
    for answer in answers:
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == "urn:longlaw:problem:database-unavailable"
        assert int(answer.headers["retry-after"]) > 0
        assert "S3cr3tPw" not in answer.text
        assert "127.0.0.1" not in answer.text
