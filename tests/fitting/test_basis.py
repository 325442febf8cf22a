"""Centred coordinates say the same as the law itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.differentiate import jacobian

from fitting.basis import Basis
from fitting.laws import LAWS, Law
from fitting.predict import log_longppl
from fitting.values import FloatArray
from tests.fitting.toy_law import FULL_GRID

SIZES = np.array(FULL_GRID)
BASIS = Basis.of(SIZES, np.array([True, True, True]))

amplitudes = st.floats(1e-3, 1.0)
exponents = st.floats(0.01, 2.0)
thetas = st.tuples(amplitudes, exponents, amplitudes, exponents, amplitudes, exponents, st.floats(-2, 2)).map(np.array)


@given(thetas)
def test_centred_values_are_those_of_the_law(theta: FloatArray) -> None:
    direct = log_longppl(BASIS.to_parameters(theta), *SIZES.T)
    # at small exponents C and the terms are large and cancel: the tolerance is that of their sizes
    size = np.abs(BASIS.to_parameters(theta)[6]) + 1
    assert BASIS.values(theta) == pytest.approx(direct, rel=1e-11, abs=1e-11 * size)


@settings(max_examples=20)
@given(thetas)
def test_derivatives_agree_with_differences(theta: FloatArray) -> None:
    step = 1e-6
    for k in range(7):
        up, down = theta.copy(), theta.copy()
        up[k] += step
        down[k] -= step
        slope = (BASIS.values(up) - BASIS.values(down)) / (2 * step)
        column = BASIS.jacobian(theta)[:, k]
        assert np.abs(column - slope).max() <= 1e-6 * (1 + np.abs(column).max())


@pytest.mark.parametrize("law", [*LAWS.values(), LAWS["effective_data"].without_offset()], ids=lambda law: law.name)
def test_second_derivatives_agree_with_differences(law: Law) -> None:
    generator = np.random.default_rng(4)
    basis = Basis.of(SIZES, np.ones(len(law.terms), dtype=np.bool_), law)
    pull = generator.normal(size=(2, len(SIZES)))
    theta = generator.uniform(0.1, 0.6, (2, law.n_parameters))
    numeric = np.empty((2, law.n_parameters, law.n_parameters))
    for k in range(law.n_parameters):
        step = 1e-5 * (np.arange(law.n_parameters) == k)
        rise = basis.gradients(theta + step) - basis.gradients(theta - step)
        numeric[:, :, k] = (rise @ pull[:, :, None])[:, :, 0] / 2e-5
    analytic = basis.curvature(theta, pull)
    assert analytic == pytest.approx(numeric, abs=1e-8 * np.abs(numeric).max())


def test_parameter_gradients_agree_with_differences() -> None:
    theta = np.array([0.15, 0.34, 0.1, 0.28, 0.12, 0.2, 3.0])
    numeric = jacobian(
        lambda x: np.moveaxis(np.log(np.abs(BASIS.to_parameters(np.moveaxis(x, 0, -1)))), -1, 0), theta
    ).df
    analytic = BASIS.parameter_gradients(theta) / BASIS.to_parameters(theta)[:, None]
    assert analytic == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_axis_that_is_not_varied_is_constant() -> None:
    basis = Basis.of(SIZES, np.array([True, True, False]))
    assert not basis.logs[:, 2].any()
    assert not basis.columns(np.array([0.3, 0.3, 0.3]))[:, 2].any()
