"""The toy law of the public fault cases, and its grid."""

from itertools import product

import numpy as np

from fitting.laws import Law
from fitting.observations import Observations, observations_from_arrays
from fitting.predict import law_values, log_longppl
from fitting.values import FloatArray

TOY = (400.0, 0.34, 410.0, 0.28, 30.0, 0.20, 1.7)
N_PARAMS = (1e8, 3e8, 1e9, 3e9)
SHORT_TOKENS = (1e9, 4e9, 1.6e10, 6.4e10)
LONG_TOKENS = (1e8, 1e9, 1e10, 1e11)

FULL_GRID = tuple(product(N_PARAMS, SHORT_TOKENS, LONG_TOKENS))
ONE_LONG_BUDGET = tuple((n, s, 1e10) for n, s in product(N_PARAMS, SHORT_TOKENS))
LONG_EQUALS_SHORT = tuple((n, s, s) for n, s in product(N_PARAMS, SHORT_TOKENS))


def noise(n: int, std: float, seed: int = 0) -> FloatArray:
    """Normal noise, the same for the same seed."""
    return np.random.default_rng(seed).normal(0.0, std, n)


def observed(law: Law, parameters: tuple[float, ...], sizes: FloatArray, std: float = 0.0) -> Observations:
    """Any law at those sizes (n x 3), with noise where asked for."""
    n_params, short_tokens, long_tokens = sizes.T
    y = law_values(law, parameters, n_params, short_tokens, long_tokens) + noise(len(sizes), std)
    return observations_from_arrays(n_params, short_tokens, long_tokens, y)


def toy_observations(
    points: tuple[tuple[float, float, float], ...] = FULL_GRID,
    *,
    std: float = 0.0,
    seed: int = 0,
    parameters: tuple[float, ...] = TOY,
) -> Observations:
    """The toy law at those points, with noise where asked for."""
    sizes = np.array(points).T
    y = log_longppl(parameters, *sizes) + noise(len(points), std, seed)
    n_params, short_tokens, long_tokens = sizes
    return observations_from_arrays(n_params, short_tokens, long_tokens, y)
