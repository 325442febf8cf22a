"""Which rows become observations, and what is said of the others."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fitting.errors import InvalidObservationsError
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import Columns, Observations, observations_from_arrays, observations_from_table
from fitting.values import RejectedRow
from tests.fitting.toy_law import FULL_GRID, toy_observations


def toy_table() -> pd.DataFrame:
    observations = toy_observations(std=0.01)
    table = pd.DataFrame(np.array(FULL_GRID), columns=["n_params", "short_tokens", "long_tokens"]).astype("int64")
    return table.assign(log_longppl=observations.log_longppl)


def refused(table: pd.DataFrame, columns: Columns | None = None) -> list[RejectedRow]:
    with pytest.raises(InvalidObservationsError) as raised:
        observations_from_table(table, columns=columns)
    return list(raised.value.rows)


def test_runs_without_a_finite_loss_are_excluded_by_number_and_change_nothing() -> None:
    """B67: NaN, +inf and NULL among 64 runs."""
    table = toy_table()
    losses = table.log_longppl.astype(object)
    losses.iloc[[9, 19, 29]] = [math.nan, math.inf, None]
    observations = observations_from_table(table.assign(log_longppl=losses))
    assert len(observations) == 61
    assert observations.excluded == (
        RejectedRow(row=10, reason="log_longppl is missing or NaN"),
        RejectedRow(row=20, reason="log_longppl is inf"),
        RejectedRow(row=30, reason="log_longppl is missing or NaN"),
    )
    clean = observations_from_table(table.drop(index=[9, 19, 29]))
    with_holes, without = (fit(LONG_CONTEXT, rows, bootstrap_draws=0) for rows in (observations, clean))
    assert with_holes.n_observations == 61
    assert with_holes.excluded == observations.excluded
    assert with_holes.parameters == pytest.approx(without.parameters, rel=1e-9)


def test_any_finite_loss_is_an_observation_whatever_its_sign() -> None:
    observations = observations_from_arrays([1e8] * 3, [1e9] * 3, [1e9] * 3, [-3.5, 0.0, 699.0])
    assert observations.log_longppl.tolist() == [-3.5, 0.0, 699.0]


def test_loss_whose_exponential_is_no_number_is_excluded() -> None:
    assert observations_from_arrays([1e8], [1e9], [1e9], [1e200]).excluded[0].reason == "log_longppl is 1e+200"


def test_short_checkpoint_is_left_out_by_rule() -> None:
    """B69: D_l = 0 never reaches the objective, and is said to be left out."""
    observations = observations_from_arrays([1e8, 1e8], [1e9, 1e9], [0, 1e9], [2.0, 1.0], row_ids=["a", "b"])
    assert observations.row_ids == ("b",)
    assert observations.excluded == (
        RejectedRow(row="a", reason="long_tokens is 0: a short checkpoint is not a point of the law"),
    )


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("n_params", -1, "n_params is -1; it must be positive"),
        ("short_tokens", 0, "short_tokens is 0; it must be positive"),
        ("long_tokens", -5, "long_tokens is -5; it must be positive"),
        ("n_params", math.inf, "n_params is inf; it must be positive"),
        ("short_tokens", None, "short_tokens is missing or NaN; it must be positive"),
        ("long_tokens", "1,000", "long_tokens is '1,000', not a number"),
        ("log_longppl", "diverged", "log_longppl is 'diverged', not a number"),
    ],
)
def test_wrong_entry_refuses_the_table_and_names_its_row(column: str, value: object, reason: str) -> None:
    """B69: a size that is not positive is a mistake of the table."""
    table = toy_table().astype(object)
    table.loc[4, column] = value  # type: ignore[call-overload]
    assert refused(table) == [RejectedRow(row=5, reason=reason)]


def test_all_wrong_rows_are_in_one_error() -> None:
    table = toy_table()
    table.loc[[0, 7, 63], "n_params"] = [0, -1, 0]
    assert [bad.row for bad in refused(table)] == [1, 8, 64]
    with pytest.raises(InvalidObservationsError, match="row 8: n_params is -1"):
        observations_from_table(table)


def test_long_list_of_wrong_rows_is_cut_in_the_message_only() -> None:
    table = toy_table().assign(n_params=0)
    with pytest.raises(InvalidObservationsError, match="and 44 more rows") as raised:
        observations_from_table(table)
    assert len(raised.value.rows) == 64


def test_missing_column_is_named_with_those_present() -> None:
    with pytest.raises(InvalidObservationsError, match=r"no column named loss; the table has: n_params, short_tokens"):
        observations_from_table(toy_table(), columns=Columns(log_longppl="loss"))


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(InvalidObservationsError, match="n_params 2, short_tokens 1"):
        observations_from_arrays([1e8, 1e8], [1e9], [1e9], [1.0])
    with pytest.raises(InvalidObservationsError, match="1 row ids for 2 rows"):
        observations_from_arrays([1e8] * 2, [1e9] * 2, [1e9] * 2, [1.0] * 2, row_ids=[1])


def test_rows_of_one_size_and_short_budget_share_a_cluster_by_default() -> None:
    observations = toy_observations()
    assert observations.n_clusters == 16
    same = observations.cluster == observations.cluster[0]
    assert len(set(zip(observations.n_params[same], observations.short_tokens[same], strict=True))) == 1


def test_named_clusters_are_used_and_a_missing_name_is_refused() -> None:
    table = toy_table().assign(run=[f"run {i % 5}" for i in range(64)])
    columns = Columns(cluster="run")
    assert observations_from_table(table, columns=columns).n_clusters == 5
    table.loc[2, "run"] = None
    assert refused(table, columns) == [RejectedRow(row=3, reason="run is missing")]


def test_counts_beyond_float_precision_that_fall_together_are_noticed() -> None:
    big = 2**53
    observations = observations_from_arrays([10] * 3, [big, big + 1, big + 4], [10] * 3, [1.0] * 3)
    assert observations.repeated_rows() == ((1, 2),)
    assert observations.n_distinct == 2


def test_seeds_at_one_point_are_no_repeats() -> None:
    observations = toy_observations((*FULL_GRID[:8], FULL_GRID[0]), std=0.01)
    assert observations.repeated_rows() == ()
    assert observations.n_distinct == 8


def test_arrays_are_float64_and_ranges_plain() -> None:
    observations: Observations = toy_observations()
    assert observations.sizes.dtype == np.float64
    assert observations.ranges.long_tokens.high == 1e11
    assert type(observations.ranges.n_params.low) is float
    assert replace(observations).row_ids[:2] == (1, 2)
