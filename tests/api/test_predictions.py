"""Predictions over HTTP: the same numbers as Python and SQL, for one point or many."""

from __future__ import annotations

import csv
import io
import math
import uuid
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from api.models import Predictions
from database.fits import load_fit
from fitting.predict import predict_all
from fitting.values import Point
from tests.api import seeding
from tests.api.conftest import Measured

POINTS = [(1e4, 2e3, 1e3), (5e4, 4e3, 2048.0), (1e6, 1e5, 1e5), (123456.0, 3456.0, 512.0)]


def test_rest_python_and_sql_give_the_same_prediction(reader: httpx.Client, measured: Measured) -> None:
    """The project's promise: one number from all three, value and interval alike."""
    at = dict(zip(("n_params", "short_tokens", "long_tokens"), map(list, zip(*POINTS, strict=True)), strict=True))
    answer = _predict(reader, at, fit=measured.fit_id)
    with Session(measured.engine) as session:
        stored = load_fit(session, uuid.UUID(measured.fit_id))
        assert stored is not None
        in_sql = [
            session.execute(
                text("SELECT value, low, high FROM research.predict_log_longppl_interval(:fit, :n, :s, :l)"),
                {"fit": measured.fit_id, "n": n, "s": short, "l": long},
            ).one()
            for n, short, long in POINTS
        ]
    points = [Point(n_params=n, short_tokens=short, long_tokens=long) for n, short, long in POINTS]
    for rest, python, sql in zip(answer["predictions"], predict_all(stored.law, points), in_sql, strict=True):
        assert python.interval is not None
        assert rest["log_longppl"] == python.value
        assert (rest["low"], rest["high"]) == (python.interval.low, python.interval.high)
        assert (sql.value, sql.low, sql.high) == pytest.approx(
            (python.value, *_ends(python.interval)), abs=1e-12, rel=0
        )


def test_prediction_says_how_sure_it_is_and_how_far_out(reader: httpx.Client, measured: Measured) -> None:
    answer = _predict(reader, {"n_params": 164224 * 10, "short_tokens": 3456, "long_tokens": 256})
    (point,) = answer["predictions"]
    assert (answer["fit_id"], answer["series_id"], answer["status"]) == (
        measured.fit_id,
        measured.series_id,
        "CONVERGED",
    )
    assert point["longppl"] == pytest.approx(math.exp(point["log_longppl"]), rel=1e-15)
    assert point["low"] <= point["log_longppl"] <= point["high"]
    assert point["prediction_low"] < point["low"]
    assert point["prediction_high"] > point["high"]
    assert point["extrapolation"] == {"n_params": 10.0, "short_tokens": 1.0, "long_tokens": 2.0}
    assert point["determined"] is True
    assert len(point["warnings"]) == 2


def test_single_number_holds_for_all_points_of_a_list(reader: httpx.Client) -> None:
    answer = _predict(reader, {"n_params": 5e4, "short_tokens": [2000, 4000, 6000], "long_tokens": 1000})
    assert [point["short_tokens"] for point in answer["predictions"]] == [2000.0, 4000.0, 6000.0]
    assert {point["n_params"] for point in answer["predictions"]} == {5e4}


def test_many_points_come_in_the_order_asked(reader: httpx.Client) -> None:
    long = [500.0 + n for n in range(6_001)]
    answer = _predict(reader, {"n_params": 5e4, "short_tokens": 4000, "long_tokens": long})
    assert [point["long_tokens"] for point in answer["predictions"]] == long
    values = [point["log_longppl"] for point in answer["predictions"]]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("holdout", [None, "long_tokens=largest"])
def test_answer_is_to_the_letter_what_its_model_would_write(reader: httpx.Client, holdout: str | None) -> None:
    """It is put together from columns; numbers, nulls, flags and texts are those of `Predictions`."""
    at = {"n_params": [1e-300, 5e4, 164224, 1e9], "short_tokens": 4000, "long_tokens": [512, 2048, 5e5, 1e-3]}
    answer = reader.post("/v1/predictions", json={"at": at, "holdout": holdout})
    read = Predictions.model_validate_json(answer.content)
    assert read.model_dump_json() == answer.text
    assert any(point.longppl is None for point in read.predictions)
    assert any(len(point.warnings) > 1 for point in read.predictions)
    assert {point.determined for point in read.predictions} >= ({True} if holdout is None else {False})


@pytest.mark.parametrize("holdout", [None, "long_tokens=largest"])
def test_table_holds_the_same_points(reader: httpx.Client, holdout: str | None) -> None:
    at = {"n_params": [1e-300, 5e4, 164224, 1e9], "short_tokens": 4000, "long_tokens": [512, 2048, 5e5, 1e-3]}
    table = reader.post("/v1/predictions", json={"at": at, "holdout": holdout}, headers={"Accept": "text/csv"})
    assert (table.headers["content-type"], table.headers["vary"]) == ("text/csv; charset=utf-8", "Accept")
    rows = list(csv.DictReader(io.StringIO(table.text, newline="")))
    answer = _predict(reader, at, holdout=holdout)
    assert table.links["describedby"]["url"] == f"/v1/fits/{answer['fit_id']}"
    for row, point in zip(rows, answer["predictions"], strict=True):
        point |= {f"extrapolation_{axis}": ratio for axis, ratio in point.pop("extrapolation").items()}
        said = {name: text for name, text in row.items() if name not in ("determined", "warnings")}
        assert {name: float(text) if text else None for name, text in said.items()} == {
            name: point[name] for name in said
        }
        assert row["determined"] == str(point["determined"]).lower()
        assert row["warnings"] == " | ".join(point["warnings"])
        assert row.keys() == point.keys()


def test_latest_fit_may_be_the_one_with_a_holdout(reader: httpx.Client, measured: Measured) -> None:
    answer = _predict(
        reader, {"n_params": 5e4, "short_tokens": 4000, "long_tokens": 4000}, holdout="long_tokens=largest"
    )
    assert answer["fit_id"] == measured.holdout_fit_id
    assert any("not identifiable" in warning for warning in answer["warnings"])
    (point,) = answer["predictions"]
    assert point["determined"] is False
    assert point["low"] is None


def test_pinned_prediction_is_cacheable_and_the_latest_is_not(reader: httpx.Client, measured: Measured) -> None:
    at = {"n_params": 1, "short_tokens": 1, "long_tokens": 1}
    pinned = reader.post("/v1/predictions", json={"fit": measured.fit_id, "at": at})
    assert "immutable" in pinned.headers["cache-control"]
    assert "cache-control" not in reader.post("/v1/predictions", json={"at": at}).headers


def test_overflowing_longppl_is_null(reader: httpx.Client) -> None:
    (point,) = _predict(reader, {"n_params": 1e-300, "short_tokens": 1, "long_tokens": 1})["predictions"]
    assert point["log_longppl"] > 710
    assert point["longppl"] is None


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"at": {"n_params": 0, "short_tokens": 1, "long_tokens": 1}}, "/at/n_params"),
        ({"at": {"n_params": 1, "short_tokens": [1, -1], "long_tokens": 1}}, "/at/short_tokens/1"),
        ({"at": {"n_params": "1e9", "short_tokens": 1, "long_tokens": 1}}, "/at/n_params"),
        ({"at": {"n_params": [1, 2], "short_tokens": [1, 2, 3], "long_tokens": 1}}, "/at"),
        ({"at": {"n_params": 1, "short_tokens": [], "long_tokens": 1}}, "/at/short_tokens"),
        ({"at": {"n_params": 1, "short_tokens": 1}}, "/at/long_tokens"),
        ({"at": {"n_params": 1, "short_tokens": 1, "long_tokens": 1}, "levle": 0.5}, "/levle"),
        ({"at": {"n_params": 1, "short_tokens": 1, "long_tokens": 1}, "level": 1}, "/level"),
        ({"at": {"n_params": 1, "short_tokens": 1, "long_tokens": 1}, "series": "a\0"}, "/series"),
        ({"at": {"n_params": 1, "short_tokens": 1, "long_tokens": 1}, "holdout": "\0"}, "/holdout"),
    ],
)
def test_wrong_request_names_the_place(reader: httpx.Client, body: dict[str, Any], place: str) -> None:
    answer = reader.post("/v1/predictions", json=body)
    assert answer.status_code == 422
    assert [item["pointer"] for item in answer.json()["errors"]] == [place]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(0, "greater than 0"), ("1e9", "valid number"), (True, "valid number"), (None, "valid number")],
)
def test_first_wrong_elements_of_a_long_list_are_named(reader: httpx.Client, wrong: Any, message: str) -> None:
    """However many there are: saying all of a million would take longer than the predictions."""
    sizes = [1.0, *[wrong] * 99_999]
    answer = reader.post("/v1/predictions", json={"at": {"n_params": 1, "short_tokens": sizes, "long_tokens": 1}})
    assert answer.status_code == 422
    assert [item["pointer"] for item in answer.json()["errors"]] == [f"/at/short_tokens/{n}" for n in range(1, 51)]
    assert all(message in item["message"] for item in answer.json()["errors"])
    assert answer.json()["detail"].endswith("more)")
    sizes[1:-1] = [2] * 99_998
    one = reader.post("/v1/predictions", json={"at": {"n_params": sizes, "short_tokens": 1, "long_tokens": 1}})
    assert [item["pointer"] for item in one.json()["errors"]] == ["/at/n_params/99999"]


def test_list_above_the_limit_is_refused(reader: httpx.Client) -> None:
    answer = reader.post(
        "/v1/predictions", json={"at": {"n_params": 1, "short_tokens": 1, "long_tokens": [0] * 1_000_001}}
    )
    assert [item["pointer"] for item in answer.json()["errors"]] == ["/at/long_tokens"]
    assert "at most 1000000 items" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" + 400 * "0", f"[1, {'1' + 400 * '0'}]"])
def test_number_that_is_none_is_refused(reader: httpx.Client, number: str) -> None:
    content = '{"at": {"n_params": NUMBER, "short_tokens": 1, "long_tokens": 1}}'.replace("NUMBER", number)
    answer = reader.post("/v1/predictions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("fit", ["newest", "00000000-0000-0000-0000-000000000000", "../../x"])
def test_unknown_fit_is_not_found(reader: httpx.Client, fit: str) -> None:
    at = {"n_params": 1, "short_tokens": 1, "long_tokens": 1}
    assert reader.post("/v1/predictions", json={"fit": fit, "at": at}).status_code == 404


def test_too_few_observations_say_how_many_there_are(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    """B63: six finished cells make no fit, and the answer says why."""
    at = {"n_params": 1, "short_tokens": 1, "long_tokens": 1}
    assert "have 0" in http.post("/v1/predictions", json={"at": at}).json()["detail"]
    with sessions.begin() as session:
        seeding.submit_grid(session, seeding.document(long_tokens=[512, 1024, 2048]))
        seeding.finish(session)
        assert seeding.fit_all(session) == []
    answer = http.post("/v1/predictions", json={"at": at})
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:longlaw:problem:too-few-observations"
    assert "need at least 7 distinct observations, have 6" in answer.json()["detail"]
    assert http.get("/v1/fits").json()["items"] == []


def test_series_must_be_named_where_there_are_several(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    """B52: what differs in the evaluator is never pooled; the answer lists what there is to choose from."""
    with sessions.begin() as session:
        seeding.submit_grid(session)
        evaluation = seeding.document()["evaluation"] | {"documents": {"count": 2, "length": 256}}
        seeding.submit_grid(session, seeding.document(evaluation=evaluation))
        seeding.finish(session)
    at = {"n_params": 1, "short_tokens": 1, "long_tokens": 1}
    answer = http.post("/v1/predictions", json={"at": at})
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:longlaw:problem:series-ambiguous"
    series = [item["id"] for item in http.get("/v1/series").json()["items"]]
    assert len(series) == 2
    assert sorted(item["message"].partition(":")[0] for item in answer.json()["errors"]) == sorted(series)
    named = http.post("/v1/predictions", json={"at": at, "series": series[0]})
    assert named.json()["type"] == "urn:longlaw:problem:too-few-observations"
    assert http.post("/v1/predictions", json={"at": at, "series": "no"}).status_code == 404


def test_fit_that_has_not_succeeded_predicts_nothing(http: httpx.Client, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        seeding.submit_grid(session)
        fit_id = session.scalar(
            text(
                "INSERT INTO fits (series_id, law, bootstrap, last_observation_id, state, reason, ended_at)"
                " SELECT id, 'long_context', 0, 0, 'FAILED', 'it took more than 600 s', now() FROM series RETURNING id"
            )
        )
    at = {"n_params": 1, "short_tokens": 1, "long_tokens": 1}
    answer = http.post("/v1/predictions", json={"fit": str(fit_id), "at": at})
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:longlaw:problem:fit-not-ready"
    assert "it took more than 600 s" in answer.json()["detail"]


def _predict(http: httpx.Client, at: dict[str, Any], **request: Any) -> dict[str, Any]:
    answer = http.post("/v1/predictions", json={"at": at, **request})
    assert answer.status_code == 200, answer.text
    predictions: dict[str, Any] = answer.json()
    return predictions


def _ends(interval: Any) -> tuple[float, float]:
    return interval.low, interval.high
