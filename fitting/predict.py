"""Predictions of a fitted law, from a fit in hand or from its stored numbers."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from fitting.errors import InvalidPointError
from fitting.identifiability import VARIED_RATIO
from fitting.laws import LONG_CONTEXT, Law, Offset, law_named
from fitting.values import Extrapolation, Fit, FittedLaw, FloatArray, Interval, Point, Prediction

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
    """What a fit says at each of several points.

    The confidence interval runs between the (1 - level)/2 and (1 + level)/2 quantiles of the bootstrap draws'
    predictions, interpolated linearly (as SQL's ``percentile_cont``). The prediction interval widens each side by the
    residual noise of one measurement, taken as normal, in quadrature.

    Args:
        fit: a fit, or the numbers of a stored one.
        at: absolute counts.
        level: nominal coverage, between 0 and 1.

    Raises:
        InvalidPointError: a size is not a positive finite number, or the level is not between 0 and 1.
    """
    law = fit.fitted_law if isinstance(fit, Fit) else fit
    form = law_named(law.law)
    if not 0 < level < 1:
        raise InvalidPointError(f"level is {level!r}; it must lie between 0 and 1")
    for point in at:
        for symbol, size in zip(form.symbols, _sizes(point), strict=True):
            if not (math.isfinite(size) and size > 0):
                raise InvalidPointError(f"{symbol} is {size!r}; it must be a positive finite number")
    if not at:
        return []
    columns = np.array([_sizes(point) for point in at], dtype=np.float64).T
    values = law_values(form, law.parameters, *columns).tolist()
    intervals = _confidence(law, form, columns, level)
    noise = NormalDist().inv_cdf((1 + level) / 2) * law.residual_std if law.residual_std is not None else None
    return [
        _prediction(law, form, point, value, interval, noise, level)
        for point, value, interval in zip(at, values, intervals, strict=True)
    ]


def _sizes(point: Point) -> tuple[float, float, float]:
    return (float(point.n_params), float(point.short_tokens), float(point.long_tokens))


def _confidence(law: FittedLaw, form: Law, columns: FloatArray, level: float) -> list[Interval | None]:
    n_points = columns.shape[1]
    if not len(law.draws):
        return [None] * n_points
    block = max(1, _BLOCK // len(law.draws))
    intervals: list[Interval | None] = []
    for start in range(0, n_points, block):
        drawn = law_values(form, law.draws, *columns[:, start : start + block])
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
        intervals += [Interval(low=a, high=b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    return intervals


def _prediction(
    law: FittedLaw,
    form: Law,
    at: Point,
    value: float,
    interval: Interval | None,
    noise: float | None,
    level: float,
) -> Prediction:
    warnings: list[str] = []
    ratios: list[float] = []
    for axis, (symbol, size, seen) in enumerate(zip(form.symbols, _sizes(at), law.ranges.axes, strict=True)):
        if axis not in form.axes:
            ratios.append(1.0)
            continue
        ratios.append(max(size / seen.high, seen.low / size, 1.0))
        if size > seen.high:
            warnings.append(f"{symbol} is {ratios[-1]:.3g} times the largest one fitted; the law has a finite range")
        elif size < seen.low:
            warnings.append(f"{symbol} is {ratios[-1]:.3g} times below the smallest one fitted")
    open_axes = _open_axes(law, form, at)
    if open_axes:
        interval = None
        axes = " and ".join(open_axes)
        warnings.append(f"the observations leave this value open: they vary {axes} too little, or only together")
    if value < 0:
        warnings.append("a LongPPL below 1 is impossible: the law is used outside its range")
    widened = None
    if interval is not None and noise is not None:
        widened = Interval(
            low=value - math.hypot(max(value - interval.low, 0.0), noise),
            high=value + math.hypot(max(interval.high - value, 0.0), noise),
        )
    return Prediction(
        at=at,
        value=value,
        level=level,
        interval=interval,
        prediction_interval=widened,
        extrapolation=Extrapolation(n_params=ratios[0], short_tokens=ratios[1], long_tokens=ratios[2]),
        determined=not open_axes,
        warnings=tuple(warnings),
    )


def _open_axes(law: FittedLaw, form: Law, at: Point) -> list[str]:
    """The axes along which this value is open, because their exponent is not identifiable.

    The value is still known where the axis was observed. For an axis that was not varied that is its range; else it is
    the ends of the range, which with two values of an axis, the usual cause, is all there is. With two such axes which
    of their combinations were observed is not at hand, so none is taken for known. An absent term is no obstacle: its
    exponent has no effect. A term of two axes has no range at hand, so it is open everywhere.
    """
    wide: list[str] = []
    open_axes: list[str] = []
    at_an_end = True
    sizes, spans = _sizes(at), law.ranges.axes
    for term in form.terms:
        if form.parameter_names[term.exponent] not in law.not_identifiable:
            continue
        symbol = " + ".join(form.symbols[axis] for axis in term.axes)
        size, seen = sizes[term.axes[0]], spans[term.axes[0]]
        if len(term.axes) > 1:
            if law.parameters[term.amplitude] > 0:
                open_axes.append(symbol)
        elif seen.high <= VARIED_RATIO * seen.low:
            if not seen.low <= size <= seen.high:
                open_axes.append(symbol)
        elif law.parameters[term.amplitude] > 0:
            wide.append(symbol)
            at_an_end = size in (seen.low, seen.high)
    if len(wide) > 1 or not at_an_end:
        open_axes += wide
    return open_axes
