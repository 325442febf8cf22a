"""Forecasting one trajectory from its beginning, and what the exponents of two metrics say of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from fitting.bootstrap import MIN_CLUSTERS
from fitting.errors import InvalidObservationsError
from fitting.holdout import score
from fitting.joint import fit
from fitting.laws import TRAJECTORY
from fitting.observations import Observations
from fitting.predict import law_values
from fitting.rows import rows_of
from fitting.values import Fit, FloatArray, Holdout, Interval, Reference, Residual


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """A trajectory seen to some point and judged on the rest.

    Attributes:
        fit: the trajectory law on the prefix.
        later: how it predicts all later checkpoints; None where there is none.
        carried: how the last loss of the prefix would have done instead.
        final_error_percent: error of the predicted loss of the last checkpoint, in percent of it; None without later.
        final: the predicted loss of the last checkpoint, or without later ones at the largest D_l of the others.
        interval: where that loss lies, as forecasts of the other trajectories missed theirs; None for too few others.
        warnings: what a reader of the forecast should know.
    """

    fit: Fit
    later: Holdout | None
    carried: Holdout | None
    final_error_percent: float | None
    final: float | None
    interval: Interval | None
    warnings: tuple[str, ...]


def forecast(
    trajectory: Observations,
    *,
    until_tokens: float,
    penalty: float = 0.0,
    reference: Reference | None = None,
    huber_delta: float = 0.05,
    others: Sequence[Observations] = (),
    level: float = 0.9,
) -> Forecast:
    """Fit B_l D_l^-beta_l + C' to a trajectory's checkpoints up to ``until_tokens`` and predict the later ones.

    Here the one-sided penalty is of use: a ``reference`` from complete trajectories (:func:`reference_exponent`) keeps
    a short prefix from bending too fast. The checkpoints of one trajectory share their noise and say nothing of how far
    its forecast may miss: the interval comes from ``others``, each forecast from a prefix of the same length and held
    against its last checkpoint. It is that of one more draw from a normal law with the mean and spread of their errors.

    Args:
        trajectory: rows of one N and one D_s.
        until_tokens: the largest D_l that is fitted.
        penalty: lambda; 1 held well on public trajectories.
        reference: the exponent above which it acts; needed for a penalty.
        huber_delta: where the loss turns linear, nats.
        others: complete trajectories of the same schedule.
        level: nominal coverage of the interval.

    Raises:
        NotEnoughObservationsError: fewer than three different D_l in a prefix.
        InvalidObservationsError: rows of several trajectories, or a penalty without a reference.
    """
    if penalty and reference is None:
        raise InvalidObservationsError("a penalty on one trajectory needs a reference from others")
    fitted, later = _of_prefix(trajectory, until_tokens, penalty, reference, huber_delta)
    misses = []
    for other in others:
        its_fit, its_later = _of_prefix(other, until_tokens, penalty, reference, huber_delta)
        if len(its_later):
            end = int(np.argmax(its_later.long_tokens))
            misses.append(float(_predicted(its_fit, its_later)[end] - its_later.log_longppl[end]))
    warnings: tuple[str, ...] = ()
    if len(misses) < MIN_CLUSTERS:
        warnings = (f"no interval: it takes {MIN_CLUSTERS} other trajectories that go on, have {len(misses)}",)
    if not len(later):
        tokens = max((float(other.long_tokens.max()) for other in others), default=None)
        final = None if tokens is None else float(law_values(TRAJECTORY, fitted.parameters, 1.0, 1.0, tokens))
        return Forecast(
            fit=fitted,
            later=None,
            carried=None,
            final_error_percent=None,
            final=final,
            interval=_interval(final, misses, level),
            warnings=warnings,
        )
    predicted = _predicted(fitted, later)
    prefix = trajectory.subset(trajectory.long_tokens <= until_tokens)
    last = prefix.log_longppl[np.argmax(prefix.long_tokens)]
    end = int(np.argmax(later.long_tokens))
    measured, final = float(later.log_longppl[end]), float(predicted[end])
    return Forecast(
        fit=fitted,
        later=score(predicted, later.log_longppl),
        carried=score(np.full(len(later), last), later.log_longppl),
        final_error_percent=100 * (final - measured) / abs(measured) if measured else None,
        final=final,
        interval=_interval(final, misses, level),
        warnings=warnings,
    )


def _of_prefix(
    trajectory: Observations, until_tokens: float, penalty: float, reference: Reference | None, huber_delta: float
) -> tuple[Fit, Observations]:
    """The fit of a trajectory's beginning, and the rows that come after."""
    rows_of(TRAJECTORY, trajectory, Residual.LINEAR)
    seen = trajectory.long_tokens <= until_tokens
    fitted = fit(
        TRAJECTORY,
        trajectory.subset(seen),
        huber_delta=huber_delta,
        bootstrap_draws=0,
        penalty=penalty,
        references=(reference,) if reference is not None else (),
    )
    return fitted, trajectory.subset(~seen)


def _predicted(fitted: Fit, rows: Observations) -> FloatArray:
    return law_values(TRAJECTORY, fitted.parameters, *rows.sizes.T)


def _interval(final: float | None, misses: list[float], level: float) -> Interval | None:
    n = len(misses)
    if final is None or n < MIN_CLUSTERS:
        return None
    reach = float(student.ppf((1 + level) / 2, n - 1) * np.std(misses, ddof=1) * (1 + 1 / n) ** 0.5)
    middle = final - float(np.mean(misses))
    return Interval(low=middle - reach, high=middle + reach)


def reference_exponent(trajectories: Sequence[Observations], *, huber_delta: float = 0.05) -> Reference:
    """The median exponent of complete trajectories, each fitted with an offset of its own.

    Raises:
        InvalidObservationsError: no trajectory.
        NotEnoughObservationsError: one with fewer than three different D_l.
    """
    if not trajectories:
        raise InvalidObservationsError("a reference needs at least one trajectory")
    exponents = [
        fit(TRAJECTORY, rows, huber_delta=huber_delta, bootstrap_draws=0).parameters[1] for rows in trajectories
    ]
    return Reference(parameter="beta_l", value=float(np.median(exponents)), n_slices=len(exponents))


def elasticity(parameters: ArrayLike, long_tokens: ArrayLike) -> FloatArray:
    """e(D) = a A D^-a: the relative fall of a metric M per relative growth of D_l, for ln M = A D^-a + const.

    Args:
        parameters: B_l, beta_l, C' of trajectory fits to ln M along the last axis.
        long_tokens: D_l (m).
    """
    amplitude, exponent, _ = np.moveaxis(np.asarray(parameters, dtype=np.float64), -1, 0)
    tokens = np.asarray(long_tokens, dtype=np.float64)
    amplitude, exponent = amplitude[..., None], exponent[..., None]
    falling: FloatArray = amplitude * exponent * tokens**-exponent
    return falling


def elasticity_ratio(of_long: Fit, of_short: Fit, long_tokens: ArrayLike) -> FloatArray:
    """R(D_l) = e_LongPPL / e_ShortPPL from trajectory fits to ln LongPPL and ln ShortPPL of the same checkpoints.

    Above one, training on long context helps the tokens that need it more than the others; infinite where ShortPPL
    does not fall.

    Raises:
        InvalidObservationsError: a fit of another law.
    """
    for fitted in (of_long, of_short):
        if fitted.law != TRAJECTORY.name:
            raise InvalidObservationsError(f"an elasticity needs fits of the law {TRAJECTORY.name}, not {fitted.law}")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: FloatArray = elasticity(of_long.parameters, long_tokens) / elasticity(of_short.parameters, long_tokens)
    return ratio
