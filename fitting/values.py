"""The values that go into and come out of the fitting library.

Every number inside them is a plain Python ``int`` or ``float`` (never a NumPy scalar, so they bind to SQL and
serialise to JSON as they are); arrays are ``draws``, and the columns of ``PredictedColumns``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

AXES = ("n_params", "short_tokens", "long_tokens")
AXIS_SYMBOLS = ("N", "D_s", "D_l")


class Status(StrEnum):
    """How a fit ended; where several hold, the first in this order is reported."""

    NOT_CONVERGED = "NOT_CONVERGED"  # the optimiser stopped before the gradient vanished
    NOT_IDENTIFIABLE = "NOT_IDENTIFIABLE"  # other parameters reach the same objective
    TERM_ABSENT = "TERM_ABSENT"  # an amplitude ended at zero
    AT_BOUND = "AT_BOUND"  # an exponent ended at the edge of its range
    CONVERGED = "CONVERGED"


class Loss(StrEnum):
    """What a residual costs."""

    HUBER = "huber"  # r^2/2 up to delta, linear beyond
    ABSOLUTE = "absolute"  # |r|: least absolute deviations, the limit for small delta


class Residual(StrEnum):
    """What is compared."""

    LINEAR = "linear"  # the loss itself
    LOG = "log"  # its logarithm


class Slicing(StrEnum):
    """How slices of the observations become a reference exponent."""

    OFFSET = "offset"  # the median of their exponents, each slice with an offset of its own
    PLAIN = "plain"  # the median slope of log y against log size: no offset, and far too low


class Resampled(StrEnum):
    """What a bootstrap draws."""

    CLUSTERS = "clusters"  # whole short checkpoints
    ROWS = "rows"  # single rows, as if they shared no noise


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """A row that is not part of a fit. ``row`` is its id, or its number counted from 1 without the header."""

    row: int | str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A closed range of numbers."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges:
    """The span of each axis over the observations of a fit, in absolute counts."""

    n_params: Interval
    short_tokens: Interval
    long_tokens: Interval

    @property
    def axes(self) -> tuple[Interval, Interval, Interval]:
        """The three spans in the order N, D_s, D_l."""
        return (self.n_params, self.short_tokens, self.long_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a prediction is asked for: parameters and tokens as absolute counts."""

    n_params: float
    short_tokens: float
    long_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedLaw:
    """What is needed of a fit to predict with it; also what a stored fit is read back into.

    Attributes:
        law: name of the law.
        parameters: its parameters for absolute counts, in the order of ``Law.parameter_names``.
        draws: bootstrap parameters, one row per refit (R x 7); no rows where intervals are withheld.
        ranges: the span of each axis over the fitted observations.
        residual_std: standard deviation of one observation about the law, in nats; None where unknown.
        not_identifiable: names of parameters that the observations leave open.
    """

    law: str
    parameters: tuple[float, ...]
    draws: FloatArray
    ranges: Ranges
    residual_std: float | None
    not_identifiable: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdout:
    """How a fit predicts observations it has not seen.

    Attributes:
        n_observations: how many were held out.
        r2: 1 - SS_res/SS_tot about the held-out mean; None where the held-out values do not vary.
        mape_log: mean |error| / |y| of y = log LongPPL, in percent; None where some y is zero.
        mape_ppl: the same of LongPPL = exp(y), in percent; None where exp overflows.
        bias: mean of predicted minus measured y, in nats.
    """

    n_observations: int
    r2: float | None
    mape_log: float | None
    mape_ppl: float | None
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The exponent that so many slices of the observations suggest."""

    parameter: str
    value: float
    n_slices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """The one-sided penalty lambda/2 * max(0, exponent - reference)^2 that a fit was made under.

    Attributes:
        strength: lambda; zero for none.
        references: the exponents above which it acts.
        binds: names of exponents above their reference, where it acts. The offset then has no meaning.
        chosen: whether lambda was chosen by predicting the largest training scale from the others.
    """

    strength: float = 0.0
    references: tuple[Reference, ...] = ()
    binds: tuple[str, ...] = ()
    chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """A law fitted to a frozen set of observations.

    ``parameters``, ``intervals`` and the columns of ``draws`` follow ``Law.parameter_names`` and hold for absolute
    counts.

    Attributes:
        law: name of the law.
        status: how the fit ended.
        parameters: the point estimate. A parameter named in ``not_identifiable`` is one choice among many.
        intervals: bootstrap interval per parameter at ``level``; None where the parameter is at a bound, is not
            identifiable, or intervals are withheld.
        objective: summed Huber loss of the residuals (quadratic zone with its factor 1/2).
        gradient_norm: largest absolute component of the objective's gradient in centred coordinates, components
            that only push against a bound left out.
        huber_delta: where the loss turns from quadratic to linear, in nats.
        level: nominal coverage of the intervals.
        seed: seed of the resampling.
        n_observations: rows fitted.
        n_clusters: groups of rows that are resampled together.
        n_draws: refits asked for.
        n_draws_ok: refits that converged on a resample able to identify what the full set identifies.
        draws: parameters of those refits (R x 7); no rows where intervals are withheld.
        residual_std: sqrt(SS_res / (n - rank)), nats; None without degrees of freedom.
        r2: 1 - SS_res/SS_tot on the fitted rows; None where y does not vary.
        mape_log: mean |residual| / |y| on the fitted rows, in percent; None where some y is zero.
        at_bound: names of parameters that ended on a bound.
        not_identifiable: names of parameters the observations leave open.
        jacobian_rank: directions of parameter space the observations determine.
        ranges: span of each axis.
        excluded: rows left out, each with its reason.
        warnings: what a reader of the numbers should know.
        holdout: the held-out evaluation, where rows were held out.
        loss: what a residual costs; ``huber_delta`` has no meaning for absolute deviations.
        residual: what is compared.
        resampled: what the bootstrap drew.
        n_starts: descents from different exponents.
        agreement: share of them that reached the best objective.
        condition_number: of the exponents' Gauss-Newton matrix once the rest is projected out; None where singular.
        penalty: what the fit was made under. ``objective`` is without it.
        unpenalised: the same fit without penalty, where there was one.
    """

    law: str
    status: Status
    parameters: tuple[float, ...]
    intervals: tuple[Interval | None, ...]
    objective: float
    gradient_norm: float
    huber_delta: float
    level: float
    seed: int
    n_observations: int
    n_clusters: int
    n_draws: int
    n_draws_ok: int
    draws: FloatArray
    residual_std: float | None
    r2: float | None
    mape_log: float | None
    at_bound: tuple[str, ...]
    not_identifiable: tuple[str, ...]
    jacobian_rank: int
    ranges: Ranges
    excluded: tuple[RejectedRow, ...]
    warnings: tuple[str, ...]
    holdout: Holdout | None
    loss: Loss = Loss.HUBER
    residual: Residual = Residual.LINEAR
    resampled: Resampled = Resampled.CLUSTERS
    n_starts: int = 1
    agreement: float = 1.0
    condition_number: float | None = None
    penalty: Penalty = Penalty()
    unpenalised: "Fit | None" = None

    @property
    def fitted_law(self) -> FittedLaw:
        """The part of this fit that predictions are made from."""
        return FittedLaw(
            law=self.law,
            parameters=self.parameters,
            draws=self.draws,
            ranges=self.ranges,
            residual_std=self.residual_std,
            not_identifiable=self.not_identifiable,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """How far a point lies outside the fitted span of each axis: max(x/largest, smallest/x, 1)."""

    n_params: float
    short_tokens: float
    long_tokens: float

    @property
    def axes(self) -> tuple[float, float, float]:
        """The three ratios in the order N, D_s, D_l."""
        return (self.n_params, self.short_tokens, self.long_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A fit's answer at one point.

    Attributes:
        at: the point.
        value: log LongPPL by the law's formula, in nats.
        level: nominal coverage of both intervals.
        interval: where the law itself lies (confidence); None where withheld or not determined.
        prediction_interval: where one new measurement would lie (adds the residual noise).
        extrapolation: how far the point lies outside the fitted spans.
        determined: False where the observations do not fix this value: it is then one choice among many.
        warnings: what a reader of the number should know.
    """

    at: Point
    value: float
    level: float
    interval: Interval | None
    prediction_interval: Interval | None
    extrapolation: Extrapolation
    determined: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedColumns:
    """A fit's answers at m points, what ``Prediction`` has of one as a column each; NaN where a number is withheld.

    Attributes:
        value: log LongPPL in nats (m).
        low: lower end of the confidence interval (m).
        high: its upper end (m).
        prediction_low: lower end of the prediction interval (m).
        prediction_high: its upper end (m).
        extrapolation: ratios of N, D_s and D_l, each (m), or (1) where one number holds for all points.
        determined: False where the observations do not fix the value (m).
        warnings: texts for each point, m tuples.
    """

    value: FloatArray
    low: FloatArray
    high: FloatArray
    prediction_low: FloatArray
    prediction_high: FloatArray
    extrapolation: tuple[FloatArray, FloatArray, FloatArray]
    determined: NDArray[np.bool_]
    warnings: Sequence[tuple[str, ...]]
