"""A grid with everything in it (phases, a model of unknown D_s, rules, follow-ups, probes) from request to SQL."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select, table, text
from sqlalchemy.orm import Session, sessionmaker

from database.models import Evaluation, Evaluator
from tests.api import seeding
from tests.orchestrator.grid_with_everything import document_with_everything


def resolved() -> dict[str, Any]:
    """The document with hashes for the names of corpora."""

    def hashed(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: f"{ord(part):032x}" if key == "corpus" and len(part) == 1 else hashed(part)
                for key, part in value.items()
            }
        return [hashed(part) for part in value] if isinstance(value, list) else value

    document: dict[str, Any] = hashed(document_with_everything())
    document["evaluation"]["every"] = 80  # measurements between those of cells, but a third fewer
    return document


def finish_cells_alone(session: Session) -> None:
    """Measures what belongs to the long stage; probes, and whatever follows a follow-up, fail for good."""
    while (segment := seeding.next_segment(session)) is not None:
        seeding.train(session, segment)
    while (claimed := seeding.next_evaluation(session)) is not None:
        row = session.query(Evaluation).filter_by(key=claimed.key).one()
        if row.follow_up is not None or "probes" in session.get_one(Evaluator, row.evaluator_id).spec:
            seeding.fail_evaluation(session, claimed, "out of memory")
        else:
            seeding.measure(session, claimed)


def test_a_corpus_named_anywhere_is_refused_in_its_place(reader: httpx.Client) -> None:
    answer = reader.post("/v1/grids", json=document_with_everything())
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("corpus-not-resolved")
    assert {place["pointer"] for place in answer.json()["errors"]} == {
        "/follow_ups/0/corpus",
        "/follow_ups/0/blended/0/corpus",
        "/follow_ups/0/evaluation/documents/corpus",
        "/follow_ups/0/evaluation/probes/documents/corpus",
        "/recipe/short/blended/0/corpus",
        "/recipe/long/blended/0/corpus",
        "/recipe/long/stages/0/corpus",
        "/recipe/long/stages/1/blended/0/corpus",
        "/evaluation/documents/corpus",
        "/evaluation/probes/documents/corpus",
    }


def test_what_is_never_fitted_fails_no_cell_and_reaches_no_fit(
    http: httpx.Client, sessions: sessionmaker[Session], engine: Engine
) -> None:
    key = {"Idempotency-Key": "everything"}
    first = http.post("/v1/grids", json=resolved(), headers=key)
    again = http.post("/v1/grids", json=resolved(), headers=key)
    assert (first.status_code, again.status_code, again.headers["idempotent-replayed"]) == (201, 201, "true")
    assert first.json() == again.json()
    with sessions.begin() as session:
        finish_cells_alone(session)
    grid = http.get(f"/v1/grids/{first.json()['id']}").json()
    assert grid["state"] == "SUCCEEDED"
    assert grid["cells"] == {"PENDING": 0, "RUNNING": 0, "MEASURED": 12, "FAILED": 0, "CANCELLED": 0}
    assert grid["tokens_done"] == grid["tokens_total"] == first.json()["plan"]["tokens"]["train"]
    assert {(failure["kind"], failure["reason"]) for failure in grid["failures"]} == {("EVALUATION", "out of memory")}
    observations = http.get("/v1/observations", params={"limit": 1000}).json()["items"]
    cells = http.get(f"/v1/grids/{first.json()['id']}/cells").json()["items"]
    assert len(observations) == sum(len(cell["evaluations"]) for cell in cells)
    assert {row["scale"]: row["short_tokens"] is None for row in observations} == {"a": False, "m": True}
    with engine.connect() as connection:
        connection.execute(text("SET ROLE longlaw_reader"))
        views = connection.scalars(
            text("SELECT table_name FROM information_schema.views WHERE table_schema = 'research'")
        ).all()
        assert len(views) > 10
        for view in views:
            connection.execute(select(text("*")).select_from(table(view, schema="research"))).all()
        measured = connection.execute(text("SELECT follow_up, log_longppl FROM research.longppl")).all()
    assert {row.follow_up for row in measured} == {None}  # probes have rows in metrics alone
    assert all(row.log_longppl is not None for row in measured)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("follow_ups", True),
        ("follow_ups", "12"),
        ("recipe/long/rope", {"method": "ntk", "factor": "1e300", "base": 1e4}),
        ("recipe/long/stages/0/until", "1e300N"),
        ("long_tokens", {"default": [2**63 - 1]}),
        ("evaluation/probes/run", [{}]),
        ("scales/m/model", None),
        ("scales", {"x" * 300: {}}),
    ],
)
def test_a_grid_that_cannot_be_is_a_problem_never_a_fault(reader: httpx.Client, path: str, value: object) -> None:
    document: Any = resolved()
    *inner, last = path.split("/")
    at = document
    for part in inner:
        at = at[int(part) if isinstance(at, list) else part]
    at[last] = value
    answer = reader.post("/v1/grids:plan", json=document)
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("invalid-grid")
    assert any(place["pointer"].startswith("/" + path.split("/")[0]) for place in answer.json()["errors"])
