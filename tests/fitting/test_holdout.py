"""Held-out rows: how they are chosen and how they are scored."""

import math

import pandas as pd
import pytest

from fitting.errors import InvalidSelectionError
from fitting.holdout import evaluate, select_rows
from fitting.observations import observations_from_arrays

FLAT = (0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)  # the law y = 1/D_l
TABLE = pd.DataFrame({"scale": ["S1", "S1", "S5"], "N": [31_000_000, 31_000_000, 821_000_000], "held_out": [0, 0, 1]})


def test_scores_are_those_computed_by_hand() -> None:
    rows = observations_from_arrays([1.0] * 3, [1.0] * 3, [1.0, 0.5, 0.25], [1.1, 2.0, 3.9])
    scores = evaluate(FLAT, rows)  # predicts 1, 2, 4
    mean = 7.0 / 3
    total = (1.1 - mean) ** 2 + (2.0 - mean) ** 2 + (3.9 - mean) ** 2
    assert scores.n_observations == 3
    assert scores.r2 == pytest.approx(1 - 0.02 / total)
    assert scores.mape_log == pytest.approx(100 / 3 * (0.1 / 1.1 + 0.1 / 3.9))
    assert scores.mape_ppl == pytest.approx(100 / 3 * (1 - math.exp(-0.1) + math.exp(0.1) - 1))
    assert scores.bias == pytest.approx(0.0, abs=1e-15)


def test_scores_that_have_no_meaning_are_none() -> None:
    constant = observations_from_arrays([1.0] * 2, [1.0] * 2, [1.0, 0.5], [1.0, 1.0])
    assert evaluate(FLAT, constant).r2 is None
    through_zero = observations_from_arrays([1.0] * 2, [1.0] * 2, [1.0, 0.5], [0.0, 1.0])
    assert evaluate(FLAT, through_zero).mape_log is None
    far = observations_from_arrays([1.0] * 2, [1.0] * 2, [1e-3, 1.0], [1.0, 2.0])
    assert evaluate(FLAT, far).mape_ppl is None


@pytest.mark.parametrize(
    ("selection", "chosen"),
    [
        ("scale=S5", [False, False, True]),
        ("held_out=1", [False, False, True]),
        ("N=3.1e7", [True, True, False]),
        (" N = 821000000 ", [False, False, True]),
    ],
)
def test_selection_compares_numbers_as_numbers(selection: str, chosen: list[bool]) -> None:
    assert select_rows(TABLE, selection).tolist() == chosen


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("scale", "not of the form COL=VALUE"),
        ("=S5", "not of the form COL=VALUE"),
        ("size=S5", "no column named size; the table has: scale, N, held_out"),
        ("scale=S6", "no row has scale=S6; its values begin S1, S5"),
    ],
)
def test_selection_that_selects_nothing_is_refused(selection: str, message: str) -> None:
    with pytest.raises(InvalidSelectionError, match=message):
        select_rows(TABLE, selection)
