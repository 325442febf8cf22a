"""Fits over HTTP: complete, and cacheable for ever."""

from __future__ import annotations

import uuid

import httpx
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from api.conditional import IMMUTABLE
from database.fits import load_fit
from tests.api import seeding
from tests.api.conftest import Measured


def test_fit_is_shown_with_all_it_knows(reader: httpx.Client, measured: Measured) -> None:
    answer = reader.get(f"/v1/fits/{measured.fit_id}")
    fit = answer.json()
    with Session(measured.engine) as session:
        stored = load_fit(session, uuid.UUID(measured.fit_id))
    assert stored is not None
    assert [item["name"] for item in fit["parameters"]] == ["A", "alpha", "B_s", "beta_s", "B_l", "beta_l", "C"]
    assert tuple(item["value"] for item in fit["parameters"]) == stored.law.parameters  # to the last bit (B95)
    assert all(item["low"] <= item["value"] <= item["high"] for item in fit["parameters"])
    assert (fit["state"], fit["status"], fit["n_observations"]) == ("SUCCEEDED", "CONVERGED", 36)
    assert fit["ranges"]["long_tokens"] == {"low": 512.0, "high": 2048.0}
    assert fit["holdout"] is None
    assert fit["explanation"]
    assert len(fit["observations"]) == 36
    for row in fit["observations"]:
        assert row["role"] == "fitted"
        assert abs(row["predicted"] - row["log_longppl"]) < 0.05
        assert row["low"] <= row["high"]


@pytest.mark.parametrize("known", ['"other", {tag}', "W/{tag}", "*"])
def test_who_has_what_never_changes_is_told_so(reader: httpx.Client, measured: Measured, known: str) -> None:
    for path in (f"/v1/fits/{measured.fit_id}", f"/v1/grids/{measured.grid_id}/document"):
        whole = reader.get(path)
        tag = whole.headers["etag"]
        assert tag[0] == tag[-1] == '"'  # strong
        again = reader.get(path, headers={"If-None-Match": known.format(tag=tag)})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
        assert again.headers["cache-control"] == whole.headers["cache-control"] == IMMUTABLE
        assert reader.get(path, headers={"If-None-Match": '"other"'}).json() == whole.json()


def test_holdout_fit_says_how_it_predicts_what_it_has_not_seen(reader: httpx.Client, measured: Measured) -> None:
    fit = reader.get(f"/v1/fits/{measured.holdout_fit_id}").json()
    assert fit["holdout"]["selection"] == "long_tokens=largest"
    assert fit["holdout"]["n_observations"] == 12
    assert fit["holdout"]["mape_log"] > 0
    roles = {row["long_tokens"]: row["role"] for row in fit["observations"]}
    assert roles == {512: "fitted", 1024: "fitted", 2048: "held_out"}


def test_list_selects_by_series_and_state(reader: httpx.Client, measured: Measured) -> None:
    ids = {item["id"] for item in reader.get("/v1/fits", params={"series": measured.series_id}).json()["items"]}
    assert ids == {measured.fit_id, measured.holdout_fit_id}
    assert reader.get("/v1/fits", params={"series": "other"}).json() == {"items": [], "next_cursor": None}
    assert reader.get("/v1/fits", params={"state": "FAILED"}).json()["items"] == []
    assert reader.get("/v1/fits", params={"state": "failed"}).status_code == 422


def test_open_fit_is_not_cached(http: httpx.Client, sessions: sessionmaker[Session], engine: Engine) -> None:
    with sessions.begin() as session:
        seeding.submit_grid(session)
    with engine.begin() as connection:
        fit_id = connection.scalar(
            text(
                "INSERT INTO fits (series_id, law, bootstrap, last_observation_id)"
                " SELECT id, 'long_context', 0, 0 FROM series RETURNING id"
            )
        )
    answer = http.get(f"/v1/fits/{fit_id}")
    assert answer.json()["state"] == "PENDING"
    assert answer.json()["parameters"] == []
    assert not {"cache-control", "etag"} & set(answer.headers)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_number_that_does_not_exist_is_null(
    http: httpx.Client, sessions: sessionmaker[Session], engine: Engine, value: str
) -> None:
    """B103: one fit with a NaN among others neither fails the list nor breaks the reader."""
    with sessions.begin() as session:
        seeding.submit_grid(session)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO fits (series_id, law, bootstrap, last_observation_id, state, status, objective, ended_at,"
                "                  r2)"
                " SELECT id, 'long_context', 0, 0, 'SUCCEEDED', 'CONVERGED', 1, now(), cast(:value AS double precision)"
                " FROM series"
            ),
            {"value": value},
        )
    answer = http.get("/v1/fits")
    assert answer.status_code == 200
    assert answer.json()["items"][0]["r2"] is None
    assert "NaN" not in answer.text
    assert "Infinity" not in answer.text


def test_unknown_fit_is_not_found(http: httpx.Client) -> None:
    answer = http.get(f"/v1/fits/{uuid.uuid4()}")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:longlaw:problem:not-found"
