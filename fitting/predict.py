"""Predictions of a fitted law, from a fit in hand or from its stored numbers."""

import math
from collections.abc import Sequence
from itertools import repeat
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from fitting import reach
from fitting.errors import InvalidPointError
from fitting.laws import LONG_CONTEXT, Law, Offset, law_named
from fitting.values import Extrapolation, Fit, FittedLaw, FloatArray, Interval, Point, PredictedColumns, Prediction

# Points times draws evaluated at once: bounds the memory of long lists of points to some tens of megabytes.
_BLOCK = 1_000_000


def log_longppl(
    parameters: ArrayLike, n_params: ArrayLike, short_tokens: ArrayLike, long_tokens: ArrayLike
) -> FloatArray:
    """The seven-parameter law: A*N^-alpha + B_s*D_s^-beta_s + B_l*D_l^-beta_l + C; see :func:`law_values`.

    The SQL function of the read contract repeats its order of operations.
    """
    return law_values(LONG_CONTEXT, parameters, n_params, short_tokens, long_tokens)


def law_values(
    law: Law, parameters: ArrayLike, n_params: ArrayLike, short_tokens: ArrayLike, long_tokens: ArrayLike
) -> FloatArray:
    """A law for absolute counts, its terms added from left to right in float64; the only place that evaluates it.

    Args:
        law: the law.
        parameters: its parameters along the last axis (P, or R x P for R sets at once).
        n_params: N, scalar or array (m).
        short_tokens: D_s, likewise.
        long_tokens: D_l, likewise; D for a law of one stage.

    Returns:
        the loss (log LongPPL) in nats: 0-d or (m) for one set of parameters, (R) or (R x m) for R sets.
    """
    sizes = [np.asarray(values, dtype=np.float64) for values in (n_params, short_tokens, long_tokens)]
    columns = np.moveaxis(np.asarray(parameters, dtype=np.float64), -1, 0)
    shape = columns.shape[1:] + (1,) * max(values.ndim for values in sizes)
    columns = columns.reshape(len(columns), *shape)
    powers = []
    for term in law.terms:
        size = sizes[term.axes[0]]
        if len(term.axes) == 2:
            size = size + (sizes[term.axes[1]] if term.rate is None else columns[term.rate] * sizes[term.axes[1]])
        powers.append(size ** -columns[term.exponent])
    value = columns[law.terms[0].amplitude] * powers[0]
    for term, power in zip(law.terms[1:], powers[1:], strict=True):
        value = value + columns[term.amplitude] * power
    for position, i, j in law.interactions:
        value = value + columns[position] * powers[i] * powers[j]
    if law.offset is not Offset.NONE:
        value = value + columns[-1]
    return np.asarray(value, dtype=np.float64)


def predict(fit: Fit | FittedLaw, at: Point, *, level: float = 0.9) -> Prediction:
    """What a fit says at one point; see :func:`predict_all`."""
    return predict_all(fit, [at], level=level)[0]


def predict_all(fit: Fit | FittedLaw, at: Sequence[Point], *, level: float = 0.9) -> list[Prediction]:
    """What a fit says at each of several points; see :func:`predict_columns`.

    Args:
        fit: a fit, or the numbers of a stored one.
        at: absolute counts.
        level: nominal coverage, between 0 and 1.

    Raises:
        InvalidPointError: a size is not a positive finite number, or the level is not between 0 and 1.
    """
    sizes = np.array([_sizes(point) for point in at], dtype=np.float64).reshape(-1, 3).T
    said = predict_columns(fit, *sizes, level=level)
    ratios = [np.broadcast_to(ratio, said.value.shape).tolist() for ratio in said.extrapolation]
    return [
        Prediction(
            at=point,
            value=value,
            level=level,
            interval=interval,
            prediction_interval=widened,
            extrapolation=Extrapolation(n_params=n, short_tokens=short, long_tokens=long),
            determined=determined,
            warnings=warned,
        )
        for point, value, interval, widened, n, short, long, determined, warned in zip(
            at,
            said.value.tolist(),
            _intervals(said.low, said.high),
            _intervals(said.prediction_low, said.prediction_high),
            *ratios,
            said.determined.tolist(),
            said.warnings,
            strict=True,
        )
    ]


def predict_columns(
    fit: Fit | FittedLaw,
    n_params: ArrayLike,
    short_tokens: ArrayLike,
    long_tokens: ArrayLike,
    *,
    level: float = 0.9,
) -> PredictedColumns:
    """What a fit says at m points, as columns.

    The confidence interval runs between the (1 - level)/2 and (1 + level)/2 quantiles of the bootstrap draws'
    predictions, interpolated linearly (as SQL's ``percentile_cont``). The prediction interval widens each side by the
    residual noise of one measurement, taken as normal, in quadrature.

    Args:
        fit: a fit, or the numbers of a stored one.
        n_params: N, a number that holds for all points or one for each (m).
        short_tokens: D_s, likewise.
        long_tokens: D_l, likewise.
        level: nominal coverage, between 0 and 1.

    Raises:
        InvalidPointError: a size is not a positive finite number, lengths differ, or the level is not between 0 and 1.
    """
    law = fit.fitted_law if isinstance(fit, Fit) else fit
    form = law_named(law.law)
    if not 0 < level < 1:
        raise InvalidPointError(f"level is {level!r}; it must lie between 0 and 1")
    sizes = _columns(form, n_params, short_tokens, long_tokens)
    count = next((size.size for size in sizes if size.size != 1), 1)
    value = np.broadcast_to(law_values(form, law.parameters, *sizes), count)
    is_open = reach.open_axes(law, form, sizes)
    determined = np.broadcast_to(~reach.anywhere(is_open), count)
    low, high = np.where(determined, _confidence(law, form, sizes, count, level), np.nan)
    noise = NormalDist().inv_cdf((1 + level) / 2) * law.residual_std if law.residual_std is not None else np.nan
    ratios = reach.extrapolation(law, form, sizes)
    return PredictedColumns(
        value=value,
        low=low,
        high=high,
        prediction_low=value - _widened(value - low, noise),
        prediction_high=value + _widened(high - value, noise),
        extrapolation=ratios,
        determined=determined,
        warnings=reach.warnings(law, form, sizes, ratios, is_open, value),
    )


def _sizes(point: Point) -> tuple[float, float, float]:
    return (float(point.n_params), float(point.short_tokens), float(point.long_tokens))


def _columns(form: Law, *given: ArrayLike) -> reach.Sizes:
    """The sizes as float64, each (m) or (1)."""
    n_params, short_tokens, long_tokens = (np.atleast_1d(np.asarray(size, dtype=np.float64)) for size in given)
    sizes = (n_params, short_tokens, long_tokens)
    for symbol, size in zip(form.symbols, sizes, strict=True):
        wrong = size[~(np.isfinite(size) & (size > 0))]
        if wrong.size:
            raise InvalidPointError(f"{symbol} is {float(wrong.flat[0])!r}; it must be a positive finite number")
    if any(size.ndim > 1 for size in sizes) or len({size.size for size in sizes} - {1}) > 1:
        shapes = ", ".join(f"{symbol} {size.shape}" for symbol, size in zip(form.symbols, sizes, strict=True))
        raise InvalidPointError(f"sizes are numbers or lists of one length, not arrays of the shapes {shapes}")
    return sizes


def _confidence(law: FittedLaw, form: Law, sizes: reach.Sizes, count: int, level: float) -> FloatArray:
    """Both ends of the confidence interval (2 x m); NaN without draws."""
    ends = np.full((2, count), np.nan)
    if not len(law.draws):
        return ends
    block = max(1, _BLOCK // len(law.draws))
    for start in range(0, count, block):
        here = slice(start, start + block)
        drawn = law_values(form, law.draws, *(size if size.size == 1 else size[here] for size in sizes))
        by_point = np.ascontiguousarray(drawn.T)
        by_point.sort(axis=1)  # in vector instructions; selecting from unsorted rows takes several times as long
        ends[:, here] = np.quantile(by_point, [(1 - level) / 2, (1 + level) / 2], axis=1, overwrite_input=True)
    return ends


def _widened(distances: FloatArray, noise: float) -> FloatArray:
    """Each distance, at least 0, in quadrature with the noise; by `math.hypot`: that of NumPy rounds less exactly."""
    return np.fromiter(map(math.hypot, np.maximum(distances, 0.0).tolist(), repeat(noise)), np.float64, distances.size)


def _intervals(lows: FloatArray, highs: FloatArray) -> list[Interval | None]:
    return [
        None if math.isnan(low) else Interval(low=low, high=high)
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True)
    ]
