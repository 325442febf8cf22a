"""Imports over HTTP: all of a table or nothing of it, every bad row named, and a law fitted to it by the service."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from api.app import create_app
from api.models_imports import MAX_ROWS
from api.routes.imports import MAX_BODY_BYTES
from database.engine import create_engine, session_factory
from database.fits import queue_fits
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import observations_from_arrays
from tests.api.conftest import Measured, serve
from tests.api.seeding import document, fit_all
from tests.conftest import MakeDatabase

TABLE = Path(__file__).parents[1] / "data" / "synthetic_paper_grid.csv"
ROW = {"n_params": 31_000_000, "short_tokens": 2_790_000_000, "long_tokens": 310_000_000, "log_longppl": 1.75}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def lab_engine(migrated_database: MakeDatabase) -> Iterator[Engine]:
    with migrated_database() as url:
        engine = create_engine(url, application_name="longlaw-test")
        yield engine
        engine.dispose()


@pytest.fixture(scope="module")
def lab(lab_engine: Engine) -> Iterator[httpx.Client]:
    """A service that the tests of this module share, each with series of its own."""
    with serve(create_app(lab_engine)) as url, httpx.Client(base_url=url, timeout=30.0, trust_env=False) as http:
        yield http


def _post(lab: httpx.Client, name: str, rows: list[Row], **description: Any) -> httpx.Response:
    series = {"name": name, "protocol": "constant", **description}
    return lab.post("/v1/observations:import", json={"series": series, "observations": rows})


def _imported(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def _table(lab: httpx.Client, content: str | bytes, name: str, **parameters: str) -> httpx.Response:
    return lab.post(
        "/v1/observations:import",
        params={"name": name, "protocol": "constant", **parameters},
        content=content,
        headers={"Content-Type": "text/csv"},
    )


def _problem(answer: httpx.Response, slug: str, status: int) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:longlaw:problem:{slug}"), answer.text
    return answer.json()  # type: ignore[no-any-return]


def _rows(lab: httpx.Client, series_id: str) -> list[Row]:
    answer = lab.get("/v1/observations", params={"series": series_id, "limit": 1000})
    return answer.json()["items"]  # type: ignore[no-any-return]


def test_rows_are_stored_as_given_with_defaults_for_what_is_left_out(lab: httpx.Client) -> None:
    full = {
        "scale": "S9",
        "short_seed": 3,
        "long_seed": 4,
        "cluster": "checkpoint 7",
        "log_longppl_se": 0.01,
        "n_params": 2**53 + 1,
        "short_tokens": 2**62 + 1,
        "long_tokens": 2**63 - 1,
        "log_longppl": 0.1 + 0.2,
    }
    perplexity = {key: value for key, value in ROW.items() if key != "log_longppl"} | {"longppl": 5.5}
    unknown = ROW | {"short_tokens": None, "long_tokens": 620e6}
    answer = _imported(_post(lab, "as given", [full, perplexity, unknown]))
    assert (answer["inserted"], answer["found_again"], answer["points"], answer["fit_follows"]) == (3, 0, 2, False)
    assert answer["note"] == "A fit needs 7 distinct points (N, D_s, D_l) with a known D_s; there are 2."
    first, second, third = _rows(lab, answer["series_id"])
    for column, value in full.items():
        assert first[column] == value
    assert first["source"] == "imported"
    assert first["evaluation_id"] is None
    assert (second["log_longppl"], second["log_longppl_se"]) == (math.log(5.5), None)
    assert (second["scale"], second["cluster"]) == ("N=31000000", "N=31000000/2790000000/0")
    assert (third["short_tokens"], third["long_tokens"], third["short_seed"], third["long_seed"]) == (
        None,
        620_000_000,
        0,
        0,
    )
    (series,) = [item for item in lab.get("/v1/series").json()["items"] if item["id"] == answer["series_id"]]
    assert (series["label"], series["family"]) == ("as given: constant, raw (imported)", "as given")
    assert answer["label"] == series["label"]


def test_the_same_description_is_the_same_series_and_another_word_another_one(lab: httpx.Client) -> None:
    first = _imported(_post(lab, "described", [ROW]))
    again = _imported(_post(lab, "described", [ROW, ROW | {"long_tokens": 5}], rule="raw", evaluator="described"))
    assert again["series_id"] == first["series_id"]
    assert (again["inserted"], again["found_again"]) == (1, 1)
    words = {"protocol": "cosine", "rule": "ema", "metric": "log_ppl", "family": "v2"}
    others = [_imported(_post(lab, "described", [ROW], **{field: word}))["series_id"] for field, word in words.items()]
    assert len({first["series_id"], *others}) == 5


def test_a_table_and_json_are_one_import(lab: httpx.Client) -> None:
    """A byte-order mark, CRLF, blank lines, spaces, a quoted cell over two lines, and the names of `longlaw fit`."""
    rows: list[Row] = [ROW, ROW | {"long_tokens": 620_000_000, "log_longppl": -0.5, "scale": "a,b"}]
    content = (
        "\ufeffN, Ds,Dl,loss,scale,standard_error\r\n"
        "31000000,2.79e9,310000000.0,1.75,,\r\n"
        ",,,,,\r\n\r\n"
        '+31000000,2790000000, 620000000 ,-5e-1,"a,b",\r\n'
    )
    answer = _imported(_table(lab, content, "two ways"))
    assert answer["inserted"] == 2
    assert _imported(_post(lab, "two ways", rows)) == answer | {"inserted": 0, "found_again": 2}


def test_an_export_is_imported_as_it_was(lab: httpx.Client, reader: httpx.Client, measured: Measured) -> None:
    """Apostrophes against formulas go again, and what only says where a row came from is passed over."""
    rows = [ROW | {"long_tokens": n, "scale": name} for n, name in enumerate(["=1+1", "-2", "'+3", "'plain", "@"], 1)]
    series_id = _imported(_post(lab, "hostile", [row | {"cluster": row["scale"]} for row in rows]))["series_id"]
    table = lab.get("/v1/observations", params={"series": series_id}, headers={"Accept": "text/csv"}).text
    assert [row["scale"] for row in csv.DictReader(io.StringIO(table))] == ["'=1+1", "'-2", "''+3", "'plain", "'@"]
    assert _imported(_table(lab, table, "hostile"))["found_again"] == 5

    exported = reader.get("/v1/observations", headers={"Accept": "text/csv"})
    answer = _imported(_table(lab, exported.content, "our own grid, from elsewhere"))
    assert (answer["inserted"], answer["fit_follows"]) == (36, True)
    assert answer["series_id"] != measured.series_id
    passed_over = {"id", "series_id", "evaluation_id", "source", "created_at"}
    for ours, theirs in zip(_rows(reader, measured.series_id), _rows(lab, answer["series_id"]), strict=True):
        for column in ours.keys() - passed_over:
            assert ours[column] == theirs[column]


def test_the_services_own_fit_of_the_published_grid_is_that_of_longlaw_fit(
    lab: httpx.Client, lab_engine: Engine
) -> None:
    """Parameters and intervals, to the last bit; then predictions, the views and the list of series serve them."""
    published = list(csv.DictReader(io.StringIO(TABLE.read_text())))
    rows = [",".join(row[column] for column in ("N", "Ds", "Dl", "loss", "scale")) for row in published]
    answer = _imported(_table(lab, "\n".join(["N,Ds,Dl,loss,scale", *rows]), "published"))
    assert (answer["inserted"], answer["points"], answer["fit_follows"], answer["note"]) == (125, 125, True, None)
    with session_factory(lab_engine).begin() as session:
        fit_all(session)
    columns = ([float(row[name]) for row in published] for name in ("N", "Ds", "Dl", "loss"))
    expected = fit(LONG_CONTEXT, observations_from_arrays(*columns), bootstrap_draws=200)

    latest = lab.get("/v1/fits", params={"series": answer["series_id"]}).json()["items"][0]["id"]
    stored = lab.get(f"/v1/fits/{latest}").json()
    assert stored["status"] == "CONVERGED"
    assert tuple(item["value"] for item in stored["parameters"]) == expected.parameters
    spans = [(item["low"], item["high"]) for item in stored["parameters"]]
    assert spans == [(item.low, item.high) if item else (None, None) for item in expected.intervals]
    assert (stored["n_observations"], stored["n_clusters"]) == (125, 25)

    at = {"n_params": 1e8, "short_tokens": 9e9, "long_tokens": 5e9}
    (point,) = _predicted(lab, {"series": answer["series_id"], "at": at})
    assert point["low"] < point["log_longppl"] < point["high"]
    with Session(lab_engine) as session:
        views = "SELECT count(*), min(y.source) FROM research.predictions p JOIN research.observations y"
        (seen,) = session.execute(text(views + " USING (observation_id) WHERE p.fit_id = :fit"), {"fit": latest})
        sql = "SELECT research.predict_log_longppl(:fit, :n_params, :short_tokens, :long_tokens)"
        assert session.scalar(text(sql), {"fit": latest, **at}) == pytest.approx(point["log_longppl"], rel=1e-12)
        series = text("SELECT latest_fit_id, family FROM research.series WHERE series_id = :id")
        assert [str(item) for item in session.execute(series, {"id": answer["series_id"]}).one()] == [
            latest,
            "published",
        ]
    assert tuple(seen) == (125, "imported")


def _predicted(lab: httpx.Client, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    answer = lab.post("/v1/predictions", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]  # type: ignore[no-any-return]


def test_rows_that_add_nothing_bring_no_fit(lab: httpx.Client, lab_engine: Engine) -> None:
    sizes = product((31_000_000, 66_000_000), (10**9, 2 * 10**9), (10**8, 2 * 10**8))
    rows = [{"n_params": n, "short_tokens": s, "long_tokens": ell, "longppl": 5 + ell / n} for n, s, ell in sizes]
    assert _imported(_post(lab, "once", rows))["fit_follows"]
    with session_factory(lab_engine).begin() as session:
        assert queue_fits(session, debounce_s=3600) == 1, "nothing is on its way that a fit should wait for"
    again = _imported(_post(lab, "once", rows))
    assert (again["fit_follows"], again["note"]) == (
        False,
        "No row is new: the fits of the series stay what they are.",
    )


_BAD: list[Row] = [
    *[{"n_params": value} for value in (0, -1, 31.5, "31000000", None, True, 2**63, 2.0**60, math.inf, math.nan)],
    *[{"short_tokens": value} for value in (0, -1, 0.5, "2790000000", 2**63)],
    *[{"long_tokens": value} for value in (0, None, 1e300, [1])],
    *[{"log_longppl": value} for value in ("1.75", math.nan, -math.inf, False)],
    *[{"log_longppl": None, "longppl": value} for value in (0, -1.0, math.inf, "5")],
    *[{"log_longppl_se": value} for value in (-0.1, math.inf)],
    *[{"short_seed": value} for value in (None, -1, 1.5, 2**63)],
    *[{"scale": value} for value in ("", "a\tb", 5, "s" * 201)],
    *[{"cluster": value} for value in ("", "\0")],
    {"logppl": 1.0},
]
_BAD_AS_A_WHOLE: list[Row] = [{"log_longppl": None}, {"log_longppl": -700.1}, {"longppl": 5.5}]


def test_every_bad_value_is_named_by_its_pointer_and_nothing_is_stored(lab: httpx.Client) -> None:
    rows = [ROW, *[ROW | change for change in (*_BAD, *_BAD_AS_A_WHOLE)]]
    content = json.dumps({"series": {"name": "bad", "protocol": "c"}, "observations": rows})  # with NaN and Infinity
    before = lab.get("/v1/series").json()
    answer = lab.post("/v1/observations:import", content=content, headers={"Content-Type": "application/json"})
    problem = _problem(answer, "invalid-request", 422)
    assert [item["pointer"] for item in problem["errors"]] == [
        *[f"/observations/{n}/{[*change][-1]}" for n, change in enumerate(_BAD, 1)],
        *[f"/observations/{n}" for n in range(len(_BAD) + 1, len(rows))],
    ]
    assert lab.get("/v1/series").json() == before


def test_every_bad_line_is_named(lab: httpx.Client) -> None:
    good = "31000000,2790000000,310000000,1.75"
    lines = [
        "n_params,short_tokens,long_tokens,log_longppl",
        good,
        "0,2790000000,310000000,1.75",
        "31000000,2790000000,310000000,nan",
        '"31000000\n",x,310000000,1.75',
        "31000000,2790000000,310000000",
        "31000000,,,",
        "9223372036854775808,1e30,1_000,1e999",
    ]
    answer = _table(lab, "\n".join(lines), "bad lines")
    problem = _problem(answer, "invalid-request", 422)
    assert problem["detail"] == (
        "line 3: n_params: Input should be greater than 0. 6 of 7 rows cannot be imported; nothing was stored."
    )
    named = [(item["line"], item["message"].partition(":")[0]) for item in problem["errors"]]
    assert named == [
        (3, "n_params"),
        (4, "log_longppl"),
        (5, "short_tokens"),
        (7, "has 3 cells where the header has 4"),
        (8, "long_tokens"),
        (9, "n_params"),
        (9, "short_tokens"),
        (9, "long_tokens"),
        (9, "log_longppl"),
    ]
    messages = [item["message"] for item in problem["errors"]]
    assert "log_longppl: Input should be a valid number, not 'nan'" in messages
    assert "long_tokens: Input should be a valid integer, not '1_000'" in messages


def test_of_many_bad_rows_fifty_are_named_and_all_counted(lab: httpx.Client) -> None:
    problem = _problem(_post(lab, "many", [ROW | {"n_params": 0}] * 1234), "invalid-request", 422)
    assert len(problem["errors"]) == 50
    assert problem["detail"].endswith("(and 1233 more)")
    table = "N,Ds,Dl,loss\n" + "0,1,1,1\n" * 1234
    problem = _problem(_table(lab, table, "many"), "invalid-request", 422)
    assert len(problem["errors"]) == 50
    assert "1,234 of 1,234 rows" in problem["detail"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "there is no column n_params"),
        ("N,Ds,Dl,loss\n", "The table has no rows."),
        (
            "N;Ds;Dl;loss\n1;1;1;1\n",
            "'N;Ds;Dl;loss' is no column of observations (cells are separated by commas, not by ';')",
        ),
        (",N,Ds,Dl,loss\n0,1,1,1,1\n", "'' is no column of observations (an index? write the table without it)"),
        ("N,Ds,Dl,loss,traj\n1,1,1,1,0\n", "'traj' is no column of observations; they are n_params, short_tokens"),
        ("N,Ds,Dl,loss,n_params\n1,1,1,1,1\n", "n_params is given 2 times"),
        ("N,Ds,Dl\n1,1,1\n", "there is no column log_longppl or longppl"),
    ],
)
def test_a_header_that_cannot_be_used_is_explained(lab: httpx.Client, content: str, says: str) -> None:
    assert says in _problem(_table(lab, content, "header"), "invalid-request", 422)["detail"]


@pytest.mark.parametrize("content", [b"\xff\xfeN\x00", b'N,Ds,Dl,loss\n1,1,1,"1\n', b'N,Ds,Dl,loss\n1,1,1,"1"2\n'])
def test_what_is_no_csv_is_malformed(lab: httpx.Client, content: bytes) -> None:
    _problem(_table(lab, content, "malformed"), "malformed-body", 400)


def test_contradicting_rows_refuse_the_import_and_each_is_named(lab: httpx.Client) -> None:
    series_id = _imported(_post(lab, "contradicted", [ROW]))["series_id"]
    (stored,) = _rows(lab, series_id)
    changed = ROW | {"log_longppl": 1.5}
    problem = _problem(_post(lab, "contradicted", [ROW | {"long_tokens": 7}, changed]), "import-conflict", 409)
    assert "1 of 2 rows contradict" in problem["detail"]
    (place,) = problem["errors"]
    assert place == {
        "pointer": "/observations/1",
        "message": f"log_longppl is 1.5, and 1.75 in observation {stored['id']}, of the same N, D_s, D_l and seeds",
    }
    assert len(_rows(lab, series_id)) == 1

    (place,) = _problem(_post(lab, "new", [ROW, ROW, changed]), "import-conflict", 409)["errors"]
    assert place["pointer"] == "/observations/2"
    assert "1.75 in /observations/0, of the same" in place["message"]
    table = "N,Ds,Dl,loss\n1,1,1,1\n\n1,1,1,2\n"
    (place,) = _problem(_table(lab, table, "new"), "import-conflict", 409)["errors"]
    assert place["line"] == 4
    assert "log_longppl is 2.0, and 1.0 in line 2, of the same" in place["message"]


def test_a_repeated_request_gets_its_first_answer(lab: httpx.Client) -> None:
    def ask(rows: list[Row], *, name: str = "repeated", key: str = "import 1") -> httpx.Response:
        body = {"series": {"name": name, "protocol": "constant"}, "observations": rows}
        return lab.post("/v1/observations:import", json=body, headers={"Idempotency-Key": key})

    _problem(ask([ROW, ROW | {"longppl": 2.0}]), "invalid-request", 422)
    first, again = ask([ROW]), ask([ROW])
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert [item.headers.get("Idempotent-Replayed") for item in (first, again)] == [None, "true"]
    assert _imported(ask([ROW], key="import 2"))["found_again"] == 1
    _problem(ask([ROW | {"long_seed": 1}]), "idempotency-key-reused", 422)
    _problem(ask([ROW], name="another"), "idempotency-key-reused", 422)
    grid = lab.post("/v1/grids", json=document(), headers={"Idempotency-Key": "import 1"})
    _problem(grid, "idempotency-key-reused", 422)


def test_sizes_are_limited_and_the_limits_named(lab: httpx.Client) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    assert "16,384 KiB" in _problem(_table(lab, body, "large"), "body-too-large", 413)["detail"]
    table = "N,Ds,Dl,loss\n" + "1,1,1,1\n" * (MAX_ROWS + 1)
    assert f"{MAX_ROWS:,} rows" in _problem(_table(lab, table, "large"), "invalid-request", 422)["detail"]
    many = '{"series": {"name": "large", "protocol": "c"}, "observations": [' + ",".join(["0"] * (MAX_ROWS + 1)) + "]}"
    answer = lab.post("/v1/observations:import", content=many, headers={"Content-Type": "application/json"})
    problem = _problem(answer, "invalid-request", 422)
    assert str(MAX_ROWS) in problem["detail"]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"protocol": "constant"}, ["name"]),
        ({"name": "s", "protocol": "", "metric": "loss"}, ["protocol", "metric"]),
        ({"name": "s", "protocol": "constant", "series": "s"}, ["series"]),
    ],
)
def test_a_table_is_described_by_parameters(lab: httpx.Client, parameters: dict[str, str], named: list[str]) -> None:
    answer = lab.post(
        "/v1/observations:import",
        params=parameters,
        content=b"N,Ds,Dl,loss\n1,1,1,1\n",
        headers={"Content-Type": "text/csv; charset=utf-8"},
    )
    assert [item["parameter"] for item in _problem(answer, "invalid-request", 422)["errors"]] == named


def test_a_description_stands_in_one_place(lab: httpx.Client) -> None:
    body = {"series": {"name": "s", "protocol": "constant"}, "observations": [ROW]}
    answer = lab.post("/v1/observations:import", params={"name": "s"}, json=body)
    assert [item["parameter"] for item in _problem(answer, "invalid-request", 422)["errors"]] == ["name"]
    body = {"series": {"name": "s"}, "observations": []}
    errors = _problem(lab.post("/v1/observations:import", json=body), "invalid-request", 422)["errors"]
    assert [item["pointer"] for item in errors] == ["/series/protocol", "/observations"]
    for content_type in ("application/yaml", ""):
        answer = lab.post("/v1/observations:import", content=b"x", headers={"Content-Type": content_type})
        _problem(answer, "unsupported-media-type", 415)
