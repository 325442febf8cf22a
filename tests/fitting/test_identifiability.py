"""What a set of rows can and cannot determine."""

import numpy as np
import pytest

from fitting.basis import Basis
from fitting.identifiability import Identifiability, identify, varied_axes
from fitting.values import FloatArray
from tests.fitting.toy_law import FULL_GRID, LONG_EQUALS_SHORT, N_PARAMS, ONE_LONG_BUDGET, SHORT_TOKENS

THETA = np.array([0.15, 0.34, 0.1, 0.28, 0.12, 0.2, 3.0])


def identified(points: object, theta: FloatArray = THETA) -> Identifiability:
    sizes = np.array(points)
    varied = varied_axes(sizes)
    usable = np.append(np.repeat(varied, 2), True)
    return identify(Basis.of(sizes, varied), theta, weights=np.ones(len(sizes)), usable=usable)


def known_at(points: object, theta: FloatArray = THETA) -> tuple[int, tuple[int, ...]]:
    known = identified(points, theta)
    return known.rank, known.open_parameters


@pytest.mark.parametrize(
    ("points", "rank", "open_parameters"),
    [
        (FULL_GRID, 7, ()),
        (ONE_LONG_BUDGET, 5, (4, 5, 6)),
        (LONG_EQUALS_SHORT, 6, (2, 3, 4, 5, 6)),
    ],
)
def test_rank_and_open_parameters(points: object, rank: int, open_parameters: tuple[int, ...]) -> None:
    """B61, by the Jacobian alone."""
    assert known_at(points) == (rank, open_parameters)


def test_exponent_of_an_absent_term_is_open_and_nothing_else() -> None:
    absent = THETA.copy()
    absent[2] = 0.0
    assert known_at(FULL_GRID, absent) == (6, (3,))


def test_terms_whose_axes_keep_one_ratio_could_exchange_roles() -> None:
    """With many values the Jacobian has full rank, and the two terms are still interchangeable."""
    points = [(n, s * f, 0.1 * s * f) for n in N_PARAMS for s in SHORT_TOKENS for f in (1, 1.3, 1.7, 2.2)]
    rank, open_parameters = known_at(points)
    assert {2, 3, 4, 5} <= set(open_parameters)
    assert 0 not in open_parameters
    assert rank >= 6


def test_correlations_are_of_logarithms_and_of_varied_axes() -> None:
    pairs = identified([(n, s, s**0.5) for n, s, _ in FULL_GRID]).correlations
    assert [(i, j) for i, j, _ in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert pairs[2][2] == pytest.approx(1.0, abs=1e-12)
    assert pairs[0][2] == pytest.approx(0.0, abs=1e-12)
    assert [(i, j) for i, j, _ in identified(ONE_LONG_BUDGET).correlations] == [(0, 1)]


def test_rank_and_condition_do_not_depend_on_units() -> None:
    known, scaled = identified(FULL_GRID), identified(np.array(FULL_GRID) * [1e-8, 1e6, 1e-9])
    assert known.rank == scaled.rank == 7
    assert known.condition == pytest.approx(scaled.condition, rel=1e-9)
