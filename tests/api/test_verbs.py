"""Verbs over HTTP: the answer is the grid after them, repeated ones do nothing, illegal ones say what is legal."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from database.models import Event, Segment
from tests.api import seeding
from tests.api.conftest import Measured


def told(http: httpx.Client, grid_id: str, verb: str, **query: str) -> dict[str, Any]:
    answer = http.post(f"/v1/grids/{grid_id}:{verb}", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def submit(http: httpx.Client, **changes: Any) -> str:
    grid_id: str = http.post("/v1/grids", json=seeding.document(**changes)).json()["id"]
    return grid_id


def test_answer_is_the_grid_after_the_verb_and_what_was_done(
    http: httpx.Client, sessions: sessionmaker[Session]
) -> None:
    grid_id = submit(http)
    with sessions.begin() as session:
        assert seeding.next_segment(session) is not None
    cancelled = told(http, grid_id, "cancel")
    done = cancelled.pop("obeyed")
    assert cancelled == http.get(f"/v1/grids/{grid_id}").json()
    assert (cancelled["state"], cancelled["verbs"], cancelled["attempts"]) == ("CANCELLED", [], [])
    assert cancelled["cells"] == {"PENDING": 0, "RUNNING": 0, "MEASURED": 0, "FAILED": 0, "CANCELLED": 4}
    counts = {name: value for name, value in done.items() if name not in ("at", "tokens_saved")}
    assert counts == {
        "verb": "cancel",
        "repeated": False,
        "preview": False,
        "segments": 6,
        "segments_kept": 0,
        "evaluations": 4,
        "evaluations_kept": 0,
        "attempts": 1,
        "cells_measured": 0,
    }
    assert done["tokens_saved"] == 2 * (27 * 64 + 1024)
    again = told(http, grid_id, "cancel")
    assert again["obeyed"] == {**done, "repeated": True}
    with sessions() as session:
        assert session.scalar(select(func.count()).where(Event.kind == "grid_cancelled")) == 1


def test_preview_says_the_same_and_does_nothing(http: httpx.Client) -> None:
    grid_id = submit(http)
    submit(http, name="another", long_tokens=[512])
    before = http.get(f"/v1/grids/{grid_id}").json()
    seen = told(http, grid_id, "cancel", preview="true")
    assert (seen["state"], seen["obeyed"]["preview"]) == ("CANCELLED", True)
    assert (seen["obeyed"]["segments"], seen["obeyed"]["segments_kept"]) == (0, 6)
    assert http.get(f"/v1/grids/{grid_id}").json() == before
    done = told(http, grid_id, "cancel")["obeyed"]
    assert {**seen["obeyed"], "preview": False, "at": ""} == {**done, "at": ""}


def test_paused_grid_says_so_until_it_is_resumed(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    grid_id = submit(http)
    paused = told(http, grid_id, "pause")
    assert paused["paused_at"] == paused["obeyed"]["at"]
    assert paused["verbs"] == ["cancel", "resume"]
    assert {item["why"] for item in paused["waiting"]} == {"paused: `longlaw grid resume` lets it go on"}
    (listed,) = http.get("/v1/grids").json()["items"]
    assert (listed["state"], listed["paused_at"]) == ("PENDING", paused["paused_at"])
    with sessions.begin() as session:
        assert seeding.next_segment(session) is None
    resumed = told(http, grid_id, "resume")
    assert (resumed["paused_at"], resumed["verbs"], resumed["obeyed"]["segments"]) == (None, ["cancel", "pause"], 6)
    with sessions.begin() as session:
        seeding.finish(session)
    assert http.get(f"/v1/grids/{grid_id}").json()["state"] == "SUCCEEDED"


def test_failed_work_is_opened_again_at_the_price_of_the_plan(
    http: httpx.Client, sessions: sessionmaker[Session]
) -> None:
    grid_id = submit(http)
    with sessions.begin() as session:
        while (segment := seeding.next_segment(session)) is not None:
            seeding.train(session, segment)
        first = seeding.next_evaluation(session)
        assert first is not None
        seeding.fail_evaluation(session, first, "out of memory")
        seeding.finish(session)
    failed = http.get(f"/v1/grids/{grid_id}").json()
    assert (failed["state"], failed["verbs"]) == ("FAILED", ["retry-failed"])
    again = told(http, grid_id, "retry-failed")
    assert (again["state"], again["failures"], again["obeyed"]["evaluations"]) == ("RUNNING", [], 1)
    for price in ("tokens_train", "flops", "gpu_hours", "tokens_total"):
        assert again[price] == failed[price]
    with sessions.begin() as session:
        seeding.finish(session)
        assert session.scalar(select(func.max(Segment.generation))) == 1  # nothing is trained for it
    assert http.get(f"/v1/grids/{grid_id}").json()["cells"]["MEASURED"] == 4


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "retry-failed"])
def test_finished_grid_refuses_every_verb_with_its_state(reader: httpx.Client, measured: Measured, verb: str) -> None:
    answer = reader.post(f"/v1/grids/{measured.grid_id}:{verb}")
    assert answer.status_code == 409
    problem = answer.json()
    assert problem["type"] == "urn:longlaw:problem:verb-not-allowed"
    assert (problem["state"], problem["legal_verbs"]) == ("SUCCEEDED", [])
    assert "The grid is SUCCEEDED" in problem["detail"]


def test_what_a_state_does_allow_is_named(http: httpx.Client) -> None:
    problem = http.post(f"/v1/grids/{submit(http)}:retry-failed").json()
    assert (problem["state"], problem["legal_verbs"]) == ("PENDING", ["cancel", "pause"])
    assert problem["detail"].endswith("what its state allows: cancel, pause.")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("00000000-0000-0000-0000-000000000000:cancel", 404),
        ("x:cancel", 404),
        ("00000000-0000-0000-0000-000000000000:destroy", 405),
        ("00000000-0000-0000-0000-000000000000:cancel?preview=perhaps", 422),
        ("00000000-0000-0000-0000-000000000000:cancel?force=true", 422),
    ],
)
def test_verb_on_nothing_is_a_problem(reader: httpx.Client, path: str, status: int) -> None:
    answer = reader.post(f"/v1/grids/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
