"""`longlaw fit`, as a person or a script calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner, Result

from longlaw.fit_command import fit_command

TABLE = Path(__file__).parents[1] / "data" / "synthetic_paper_grid.csv"


def longlaw_fit(*arguments: object) -> Result:
    app = typer.Typer()
    app.command("fit")(fit_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def fitted(*arguments: object) -> dict[str, Any]:
    result = longlaw_fit(*arguments, "--json")
    assert result.exit_code == 0, result.output

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    parsed: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse)
    return parsed


def refused(*arguments: object) -> str:
    result = longlaw_fit(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def small_table(tmp_path: Path) -> Path:
    """Six rows: one too few."""
    path = tmp_path / "small.csv"
    pd.read_csv(TABLE).iloc[::20].head(6).to_csv(path, index=False)
    return path


def test_json_has_the_promised_keys_and_the_certified_optimum() -> None:
    answer = fitted(TABLE, "--loss-col", "loss", "--holdout", "scale=S5", "--bootstrap", 25)
    promised = {"law", "status", "objective", "gradient_norm", "params", "intervals", "n_observations", "holdout"}
    assert promised | {"penalty", "warnings", "excluded"} <= set(answer)
    assert answer["law"] == "long_context"
    assert answer["status"] == "CONVERGED"
    assert answer["objective"] == pytest.approx(5.0069066020e-03, rel=1e-9)
    assert list(answer["params"]) == ["A", "alpha", "B_s", "beta_s", "B_l", "beta_l", "C"]
    low, high = answer["intervals"]["alpha"]
    assert low < answer["params"]["alpha"] < high
    assert answer["n_observations"] == 100
    assert answer["holdout"]["r2"] == pytest.approx(0.93888, abs=1e-5)
    assert {"r2", "mape_log", "mape_ppl", "bias"} <= set(answer["holdout"])
    assert answer["penalty"] == {"lambda": 0, "binds": False}


def test_json_says_how_the_fit_was_made_and_shows_it_without_penalty() -> None:
    answer = fitted(TABLE, "--holdout", "scale=S5", "--bootstrap", 0, "--penalty", 1, "--slices", "plain")
    assert answer["penalty"] == {"lambda": 1.0, "binds": True}
    assert set(answer["references"]) == {"beta_s", "beta_l"}
    assert answer["objective"] > answer["unpenalised"]["objective"]
    assert answer["unpenalised"]["objective"] == pytest.approx(5.0069066020e-03, rel=1e-9)
    assert answer["unpenalised"]["holdout"]["r2"] == pytest.approx(0.93888, abs=1e-5)
    assert answer["intervals"]["C"] is None
    assert any("C is not interpretable" in warning for warning in answer["warnings"])
    plain = fitted(TABLE, "--bootstrap", 0)
    assert plain["unpenalised"]["params"] == plain["params"]


def test_penalty_may_be_chosen_by_the_command() -> None:
    answer = fitted(TABLE, "--holdout", "scale=S5", "--bootstrap", 0, "--penalty", "auto")
    assert answer["penalty"]["lambda"] in (0, 0.01, 0.1, 1, 100)
    assert any("predicts the largest scale best" in warning for warning in answer["warnings"])


@pytest.mark.parametrize(
    ("settings", "objective", "params"),
    [
        (
            ("--huber-delta", "1e-3"),
            0.00101827401778,
            {"A": 477.825868, "alpha": 0.34731050, "B": 2143.4174, "beta": 0.36717243, "E": 1.8172181},
        ),
        (
            ("--lad",),
            1.129494653603,
            {"A": 482.00606, "alpha": 0.34781307, "B": 2085.43625, "beta": 0.36585416, "E": 1.8168641},
        ),
    ],
)
def test_published_table_has_its_optimum(settings: tuple[str, ...], objective: float, params: dict[str, float]) -> None:
    table = TABLE.parent / "epoch_chinchilla.csv"
    answer = fitted(
        table, "--law", "chinchilla", "--residual", "log", "--drop", "excluded_by_epoch=1", "--bootstrap", 0, *settings
    )
    assert answer["n_observations"] == 240
    assert answer["objective"] == pytest.approx(objective, rel=1e-11)
    assert answer["params"] == pytest.approx(params, rel=1e-6)


def test_comparison_profiles_and_figures_come_on_request(tmp_path: Path) -> None:
    arguments = ("--law", "combined_budget", "--holdout", "scale=S5", "--bootstrap", 0)
    answer = fitted(TABLE, *arguments, "--compare", "--profile", "--plot", tmp_path / "figures")
    assert answer["comparison"][0]["name"] == "long_context"
    assert {"mean of y", "no_offset"} <= {line["name"] for line in answer["comparison"]}
    low, high = answer["profile_intervals"]["beta"]
    assert low < answer["params"]["beta"] < high
    assert (tmp_path / "figures" / "variants.png").exists()
    assert fitted(TABLE, *arguments)["comparison"] == []
    shown = longlaw_fit(TABLE, *arguments, "--compare").stdout
    assert "nearest observation" in shown


def test_one_trajectory_is_fitted_with_or_without_its_sizes(tmp_path: Path) -> None:
    table = pd.read_csv(TABLE)
    one = table[table.traj == 3]
    with_sizes, without = tmp_path / "with.csv", tmp_path / "without.csv"
    one.to_csv(with_sizes, index=False)
    one[["Dl", "loss_true"]].to_csv(without, index=False)
    answers = [
        fitted(p, "--law", "trajectory", "--loss-col", "loss_true", "--bootstrap", 0) for p in (with_sizes, without)
    ]
    assert answers[0]["params"] == answers[1]["params"]
    assert answers[0]["params"]["beta_l"] == pytest.approx(0.2, abs=1e-5)
    assert "one N and one D_s" in refused(TABLE, "--law", "trajectory")


def test_standard_errors_weigh_rows(tmp_path: Path) -> None:
    table = pd.read_csv(TABLE)
    table["se"] = 0.01 + 0.2 * table.is_outlier
    path = tmp_path / "weighted.csv"
    table.to_csv(path, index=False)
    weighted = fitted(path, "--loss-col", "loss_outliers", "--error-col", "se", "--drop", "scale=S5", "--bootstrap", 0)
    assert (
        weighted["params"]
        != fitted(path, "--loss-col", "loss_outliers", "--drop", "scale=S5", "--bootstrap", 0)["params"]
    )
    table.loc[3, "se"] = 0
    table.to_csv(path, index=False)
    assert "row 4: se is 0; it must be positive" in refused(path, "--error-col", "se")


def test_counts_beyond_float_precision_are_said(tmp_path: Path) -> None:
    table = pd.read_csv(TABLE)
    table["Dl"] = table["Dl"].astype("int64")
    table.loc[0, "Dl"] = 2**53 + 1
    path = tmp_path / "large.csv"
    table.to_csv(path, index=False)
    assert any(w.startswith("rows 1 have counts of 2^53") for w in fitted(path, "--bootstrap", 0)["warnings"])


def test_same_call_gives_the_same_json_and_another_seed_other_intervals() -> None:
    arguments = (TABLE, "--holdout", "scale=S5", "--bootstrap", 25)
    assert fitted(*arguments) == fitted(*arguments)
    assert fitted(*arguments)["intervals"] != fitted(*arguments, "--seed", 1)["intervals"]


def test_dropped_rows_are_listed_and_not_fitted() -> None:
    answer = fitted(
        TABLE, "--loss-col", "loss_outliers", "--drop", "is_outlier=1", "--drop", "scale=S5", "--bootstrap", 0
    )
    assert answer["n_observations"] == 96
    reasons = {row["reason"] for row in answer["excluded"]}
    assert reasons == {"dropped by is_outlier=1", "dropped by scale=S5"}
    assert [row["row"] for row in answer["excluded"]][:4] == [21, 22, 84, 86]
    assert answer["holdout"] is None


def test_parquet_and_other_column_names_give_the_same_fit(tmp_path: Path) -> None:
    table = pd.read_csv(TABLE).rename(columns={"N": "params", "Ds": "short", "Dl": "long", "loss": "y"})
    path = tmp_path / "grid.parquet"
    table.to_parquet(path)
    names = ("--n-col", "params", "--short-col", "short", "--long-col", "long", "--loss-col", "y")
    there = fitted(path, *names, "--bootstrap", 0)
    assert there["params"] == fitted(TABLE, "--bootstrap", 0)["params"]


def test_named_cluster_replaces_the_default(tmp_path: Path) -> None:
    by_scale = fitted(TABLE, "--cluster", "scale", "--bootstrap", 0)
    assert by_scale["n_clusters"] == 5
    assert fitted(TABLE, "--bootstrap", 0)["n_clusters"] == 25


def test_diverged_run_is_listed_by_its_row(tmp_path: Path) -> None:
    """B67 from a file: an empty cell and an inf."""
    table = pd.read_csv(TABLE)
    table.loc[9, "loss"] = None
    table.loc[19, "loss"] = float("inf")
    path = tmp_path / "holes.csv"
    table.to_csv(path, index=False)
    answer = fitted(path, "--bootstrap", 0)
    assert [row["row"] for row in answer["excluded"]] == [10, 20]
    shown = longlaw_fit(path, "--bootstrap", 0).stdout
    assert "left out 1 rows (10): loss is missing or NaN" in shown


def test_reader_sees_parameters_held_out_scores_and_plain_words() -> None:
    result = longlaw_fit(TABLE, "--holdout", "scale=S5", "--bootstrap", 25)
    assert result.exit_code == 0
    for expected in ("log_longppl = A*N^-alpha", "CONVERGED", "beta_l", "0.2226836", "held out", "found the minimum"):
        assert expected in result.stdout


def test_too_few_rows_are_an_error_with_both_numbers(small_table: Path) -> None:
    """B63."""
    assert "need at least 7 distinct observations, have 6" in refused(small_table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loss-col", "nope"), "no column named nope; the table has: N, Ds, Dl"),
        (("--loss-col", "scale"), "scale is 'S1', not a number"),
        (("--holdout", "scale=S9"), "no row has scale=S9"),
        (("--drop", "scale"), "not of the form COL=VALUE"),
        (("--level", "1.5"), "level is 1.5"),
        (("--huber-delta", "0"), "huber_delta is 0.0"),
        (("--penalty", "strong"), "--penalty is 'strong'; it must be auto, none or a number"),
        (("--penalty", "-1"), "the penalty is -1.0"),
        (("--law", "kaplan"), "there is no law named 'kaplan'; known laws: long_context, no_offset"),
        (("--law", "chinchilla", "--tokens-col", "T"), "no column named T"),
        (("--law", "combined_budget", "--penalty", "1"), "has no exponent of D_s or D_l alone"),
    ],
)
def test_mistake_is_one_message_on_stderr_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(TABLE, *arguments)


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "absent.csv")
    text = tmp_path / "table.txt"
    text.write_text("N\n1\n")
    assert "neither .csv nor .parquet" in refused(text)
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert "cannot read" in refused(empty)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    assert "cannot read" in refused(broken)


def test_command_loads_neither_torch_nor_a_service() -> None:
    program = "import sys, longlaw.fit_command as c; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ.copy()
    ).stdout.split()
    assert {"fitting", "scipy"} <= set(loaded)
    assert not {"matplotlib", "torch", "ray", "fastapi", "sqlalchemy", "httpx"} & set(loaded)


def test_one_trajectory_may_come_with_an_empty_column_of_short_tokens(tmp_path: Path) -> None:
    """Rows of a released model, as the service exports them: nobody knows its D_s."""
    rows = [f"8e9,,{k}e9,{1.2 + 3 * (k * 1e9) ** -0.1:.9f}" for k in range(1, 13)]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["n_params,short_tokens,long_tokens,log_longppl", *rows]))
    columns = ["--n-col", "n_params", "--short-col", "short_tokens", "--long-col", "long_tokens"]
    found = fitted(table, "--law", "trajectory", *columns, "--loss-col", "log_longppl", "--bootstrap", 0)
    assert found["params"]["beta_l"] == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(("option", "value"), [("--seed", -1), ("--bootstrap", -1), ("--bootstrap", 10**20)])
def test_numbers_that_no_refit_can_use_are_refused_by_the_name_of_their_option(option: str, value: int) -> None:
    result = longlaw_fit(TABLE, option, value)
    assert result.exit_code == 2
    assert option in result.stderr
