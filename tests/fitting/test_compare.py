"""The comparison of laws and baselines."""

import math

import numpy as np
import pytest

from fitting.compare import bic, compare
from fitting.errors import InvalidObservationsError
from fitting.holdout import evaluate
from fitting.joint import fit
from fitting.laws import COMBINED_BUDGET, LONG_CONTEXT, NO_OFFSET
from fitting.observations import observations_from_arrays
from fitting.values import Status
from tests.fitting.paper_grid import paper_grid
from tests.fitting.toy_law import FULL_GRID, toy_observations

BASELINES = {"mean of y", "nearest observation", "plane in logarithms"}


def test_true_law_predicts_a_held_out_scale_best_and_every_line_is_filled() -> None:
    rows, held = paper_grid("loss"), paper_grid("loss", held_out=True)
    table = compare(rows, held)
    assert table[0].name == "long_context"
    assert {item.name for item in table} >= BASELINES | {"no_offset", "effective_data", "interactions"}
    errors = [item.holdout.mape_ppl for item in table if item.holdout is not None and item.holdout.mape_ppl is not None]
    assert len(errors) == len(table) == 9
    assert errors == sorted(errors)
    first = table[0]
    assert first.holdout == evaluate(fit(LONG_CONTEXT, rows, bootstrap_draws=0).parameters, held)
    assert first.bic == pytest.approx(100 * math.log(2 * 5.0069066e-3 / 100) + 7 * math.log(100), rel=1e-6)


def test_without_held_out_rows_the_order_is_that_of_bic() -> None:
    """With C = 0 the law that leaves it out wins."""
    zero_offset = (400.0, 0.34, 410.0, 0.28, 30.0, 0.20, 0.0)
    table = compare(toy_observations(std=0.01, parameters=zero_offset), laws=(LONG_CONTEXT, NO_OFFSET, COMBINED_BUDGET))
    assert table[0].name == "no_offset"
    values = [item.bic for item in table if item.bic is not None]
    assert values == sorted(values)


def test_baselines_are_what_they_say() -> None:
    rows = observations_from_arrays([1e8, 1e8, 1e8], [1e9] * 3, [1e8, 1e9, 1e10], [3.0, 2.0, 1.0])
    held = observations_from_arrays([1e8], [1e9], [1e11], [0.5])
    table = {item.name: item for item in compare(rows, held, laws=())}
    assert set(table) == BASELINES
    biases = {name: item.holdout.bias for name, item in table.items() if item.holdout is not None}
    assert biases == pytest.approx({"mean of y": 1.5, "nearest observation": 0.5, "plane in logarithms": -0.5})


def test_law_with_too_many_parameters_for_the_rows_has_an_empty_line() -> None:
    few = toy_observations(FULL_GRID[::11], std=0.01)
    line = next(item for item in compare(few) if item.name == "long_context")
    assert (line.status, line.objective, line.bic) == (None, None, None)


def test_status_of_each_fit_is_kept() -> None:
    below_zero = paper_grid("loss")
    line = next(item for item in compare(below_zero) if item.name == "nonnegative_offset")
    assert line.status is Status.AT_BOUND


def test_nothing_to_compare_on_is_refused() -> None:
    nothing = observations_from_arrays([1e8], [1e9], [1e9], [math.nan])
    with pytest.raises(InvalidObservationsError, match="nothing to compare on"):
        compare(nothing)


def test_criterion_is_schwarzs_for_squares() -> None:
    residuals = np.array([0.01, -0.02, 0.005])
    squares = float((residuals**2).sum())
    assert bic(squares / 2, 3, 2) == pytest.approx(3 * math.log(squares / 3) + 2 * math.log(3))
