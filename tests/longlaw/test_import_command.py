"""`longlaw import` and `Client.import_observations`: tables of one's own, brought to a real service."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from sqlalchemy import Engine
from typer.testing import CliRunner

from api.app import create_app
from database.engine import create_engine
from longlaw import Client
from longlaw.errors import ApiProblem, LonglawError
from longlaw.import_command import import_command
from tests.api.conftest import serve
from tests.conftest import MakeDatabase

TABLE = Path(__file__).parents[1] / "data" / "synthetic_paper_grid.csv"
COLUMNS: dict[str, Any] = {
    "n_params": [31_000_000, 66_000_000],
    "short_tokens": [10**9, 10**9],
    "long_tokens": [10**8, 2 * 10**8],
    "log_longppl": [1.75, 1.5],
}


@pytest.fixture(scope="module")
def lab(migrated_database: MakeDatabase) -> Iterator[Client]:
    """A client of a service that the tests of this module share, each with series of its own."""
    with migrated_database() as database_url:
        engine: Engine = create_engine(database_url, application_name="longlaw-test")
        with serve(create_app(engine)) as url, Client(url) as client:
            yield client
        engine.dispose()


def _asked(lab: Client, table: Path, series: str, *options: str) -> Any:
    app = typer.Typer()
    app.command("import")(import_command)
    arguments = [str(table), "--series", series, "--protocol", "constant", "--url", lab.base_url, *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def _imported(lab: Client, table: Path, series: str, *options: str) -> dict[str, Any]:
    result = _asked(lab, table, series, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def _refused(lab: Client, table: Path, series: str, *options: str) -> str:
    result = _asked(lab, table, series, *options)
    assert isinstance(result.exception, LonglawError)
    return str(result.exception)


def _write(folder: Path, content: str, *, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def test_a_table_of_longlaw_fit_is_imported_to_the_last_bit(lab: Client) -> None:
    result = _asked(lab, TABLE, "published", "--rule", "last_m", "--evaluator", "books")
    assert result.exit_code == 0, result.output
    assert "125 rows imported, 0 found again: published: constant, last_m (imported, evaluator books)" in result.stdout
    assert "125 distinct points" in result.stdout
    assert "columns that were not read: D, loss_true, traj, loss_clustered, loss_outliers, is_outlier, held_out" in (
        result.stdout
    )
    again = _imported(lab, TABLE, "published", "--rule", "last_m", "--evaluator", "books")
    assert (again["inserted"], again["found_again"], again["fit_follows"]) == (0, 125, False)
    stored = list(lab.observations(series=again["series_id"]))
    table = pd.read_csv(TABLE)
    assert [row.log_longppl for row in stored] == [float(text) for text in pd.read_csv(TABLE, dtype=str)["loss"]]
    assert [row.n_params for row in stored] == table["N"].tolist()
    assert [row.scale for row in stored] == table["scale"].tolist()


def test_columns_may_be_called_anything_and_hold_what_is_missing(lab: Client, tmp_path: Path) -> None:
    table = _write(
        tmp_path,
        "size,params, short,long,ppl,se,run,run of,name\n"
        "1,9007199254740993,,1e8,5.5,0.01,3,4,2024-01-01\n"
        "02,9007199254740995,1000000001,100000001,6.5,,0,0,\n",
    )
    names = {"n": "params", "short": "short", "long": "long", "ppl": "ppl", "error": "se", "scale": "size"}
    names |= {"short-seed": "run", "long-seed": "run of"}
    options = [part for option, column in names.items() for part in (f"--{option}-col", column)]
    series_id = _imported(lab, table, "anything", *options, "--cluster", "name")["series_id"]
    first, second = lab.observations(series=series_id)
    assert (first.scale, second.scale) == ("1", "02")
    assert (first.n_params, second.n_params) == (2**53 + 1, 2**53 + 3)
    assert (first.short_tokens, second.short_tokens, first.long_tokens) == (None, 1_000_000_001, 10**8)
    assert (first.log_longppl, first.log_longppl_se, second.log_longppl_se) == (math.log(5.5), 0.01, None)
    assert (first.short_seed, first.long_seed) == (3, 4)
    assert (first.cluster, second.cluster) == ("2024-01-01", "02/1000000001/0")


def test_parquet_is_read_too(lab: Client, tmp_path: Path) -> None:
    frame = pd.DataFrame(COLUMNS | {"scale": [1, 2], "short_tokens": [math.nan, 1e9]})
    path = tmp_path / "table.parquet"
    frame.to_parquet(path)
    rows = list(lab.observations(series=_imported(lab, path, "parquet")["series_id"]))
    assert [(row.scale, row.short_tokens) for row in rows] == [("1", None), ("2", 10**9)]


def test_bad_rows_are_named_as_the_table_has_them(lab: Client, tmp_path: Path) -> None:
    table = _write(tmp_path, "N,Ds,Dl,loss\n31000000,1,1,1.5\n-1,1,1,1.5\n31000000,1,0,\n")
    said = _refused(lab, table, "bad")
    assert "line 3, N '-1': Input should be greater than 0" in said
    assert "line 4, Dl '0': Input should be greater than 0" in said
    assert "/observations" not in said
    table = _write(tmp_path, "N,Ds,Dl,loss\n1,1,1,1.5\n1,1,1,2.5\n")
    assert "log_longppl is 2.5, and 1.5 in line 2, of the same N, D_s, D_l and seeds" in _refused(lab, table, "bad")
    said = _refused(lab, _write(tmp_path, "N,Ds,Dl,loss\n1,1,1,1.5\n\n31M,1,1,1.5\n1,1,2,nan\n"), "bad")
    assert said.splitlines()[1:] == [
        "  line 4, N '31M': Input should be a valid integer",
        "  line 5, loss 'nan': Input should be a valid number",
    ]
    assert "bad" not in {series.label.partition(":")[0] for series in lab.series()}


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("N,Ds,Dl,loss,n_params\n", (), "N and n_params may both be n_params: choose one with --n-col"),
        ("N,Ds,Dl,loss,longppl\n", (), "loss and longppl are both there: choose one with --loss-col or --ppl-col"),
        ("N,Ds,Dl\n", (), "no column named loss or log_longppl (--loss-col); the table has: N, Ds, Dl"),
        ("N,Ds,Dl,loss\n", ("--n-col", "M"), "no column named M (--n-col)"),
        (
            "N,Ds,Dl,loss\n",
            ("--n-col", "Ds"),
            "Ds cannot be n_params and short_tokens at once: see --n-col and --short",
        ),
        ("N,N,Dl,loss\n", (), "several columns named N"),
        ("", (), "it is empty"),
        ("N,Ds,Dl,loss\n", (), "there are no rows"),
        ("N;Ds;Dl;loss\n1;1;1;1,5\n", (), "cells are separated by commas, not by ';'"),
        ("N,Ds,Dl,loss\n1,1,1,1\n1,1,1\n", (), "line 3 has 3 cells where the header has 4"),
        ('N,Ds,Dl,loss\n1,1,1,"1\n', (), "Line 2 is not CSV"),
    ],
)
def test_a_table_that_cannot_be_used_is_explained(
    lab: Client, tmp_path: Path, content: str, options: tuple[str, ...], said: str
) -> None:
    assert said in _refused(lab, _write(tmp_path, content), "never", *options)


def test_files_that_are_no_tables_are_named(lab: Client, tmp_path: Path) -> None:
    assert "neither .csv nor .parquet" in _refused(lab, _write(tmp_path, "x", name="table.txt"), "never")
    assert "cannot read" in _refused(lab, _write(tmp_path, "x", name="table.parquet"), "never")
    assert "cannot read" in _refused(lab, tmp_path / "absent.csv", "never")
    (tmp_path / "latin.csv").write_bytes("N,Ds,Dl,lösung\n".encode("latin-1"))
    assert "it is not UTF-8 (byte 9)" in _refused(lab, tmp_path / "latin.csv", "never")


def test_an_index_is_not_read_and_whole_numbers_beside_others_stay_exact(lab: Client, tmp_path: Path) -> None:
    table = _write(tmp_path, "\ufeff,N,Dl,loss,cluster\r\n0,1e3,9007199254740993,2,'=a\r\n1,1000,2e9,2,\r\n")
    result = _asked(lab, table, "exact")
    assert "columns that were not read: (without a name)" in result.stdout
    series_id = _imported(lab, table, "exact")["series_id"]
    rows = [(row.n_params, row.long_tokens, row.cluster) for row in lab.observations(series=series_id)]
    assert rows == [(1000, 2**53 + 1, "=a"), (1000, 2 * 10**9, "N=1000/unknown/0")]


def test_decimals_of_parquet_are_numbers_and_short_floats_no_large_counts(lab: Client, tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    frame = pd.DataFrame(COLUMNS | {"log_longppl": [Decimal("1.75"), Decimal("2.00")]})
    frame.to_parquet(path)
    rows = lab.observations(series=_imported(lab, path, "decimals")["series_id"])
    assert [row.log_longppl for row in rows] == [1.75, 2.0]
    frame.astype({"n_params": "float32"}).to_parquet(path)
    assert "n_params is 31000000 in row 1, a float too short" in _refused(lab, path, "never")
    frame.astype({"n_params": "float32"}).assign(n_params=np.float32(2**24)).to_parquet(path)
    assert _imported(lab, path, "decimals")["inserted"] == 2


@pytest.mark.parametrize(
    "table",
    [
        COLUMNS,
        {name: np.array(values) for name, values in COLUMNS.items()},
        {name: list(np.array(values)) for name, values in COLUMNS.items()},
        pd.DataFrame(COLUMNS),
        pd.DataFrame(COLUMNS | {"scale": [None, math.nan]}).convert_dtypes(),
    ],
    ids=["lists", "arrays", "scalars of numpy", "frame", "nullable frame"],
)
def test_columns_are_taken_from_whatever_holds_them(lab: Client, table: Any) -> None:
    answer = lab.import_observations(table, series="columns", protocol="constant")
    assert answer.inserted + answer.found_again == 2
    assert {row.log_longppl for row in lab.observations(series=answer.series_id)} == {1.75, 1.5}
    assert answer.note is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": [1.0, 2.0]}, "observations have no loss; their columns are n_params"),
        ({"scale": ["a"]}, "all columns need the same number of rows, have n_params 2, .* scale 1"),
        ({"scale": "ab"}, "scale must be a list"),
        ({"long_seed": 7}, "long_seed must be a list"),
        ({"n_params": np.array([1, 31e6], dtype=np.float32)}, "n_params is 31000000 in row 2, a float too short"),
        ({"n_params": [np.float32(31e6), 1]}, "n_params is 31000000 in row 1, a float too short"),
        ({"scale": ["a", b"b"]}, "scale is b'b' in row 2: only numbers and text"),
        ({name: [] for name in COLUMNS}, "there are no rows"),
        ({"log_longppl": [1.0, -math.inf]}, "log_longppl is -inf in row 2"),
    ],
)
def test_columns_that_cannot_be_sent_are_named(lab: Client, change: dict[str, Any], said: str) -> None:
    with pytest.raises(LonglawError, match=said):
        lab.import_observations(COLUMNS | change, series="never", protocol="constant")


def test_a_name_that_is_no_text_is_not_sent(lab: Client) -> None:
    with pytest.raises(LonglawError, match="cannot be sent"):
        lab.import_observations(COLUMNS, series="\udcff", protocol="constant")


def test_what_is_missing_and_needed_is_named_by_the_service(lab: Client) -> None:
    with pytest.raises(ApiProblem) as raised:
        lab.import_observations(COLUMNS | {"n_params": [1, math.nan]}, series="never", protocol="constant")
    assert raised.value.places[0].where == "/observations/1/n_params"
