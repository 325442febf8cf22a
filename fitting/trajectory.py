"""Forecasting one trajectory from its beginning, and what the exponents of two metrics say of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fitting.errors import InvalidObservationsError
from fitting.holdout import score
from fitting.joint import fit
from fitting.laws import TRAJECTORY
from fitting.observations import Observations
from fitting.predict import law_values
from fitting.rows import rows_of
from fitting.values import Fit, FloatArray, Holdout, Reference, Residual


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forecast:
    """A trajectory seen to some point and judged on the rest.

    Attributes:
        fit: the trajectory law on the prefix.
        later: how it predicts all later checkpoints; None where there is none.
        carried: how the last loss of the prefix would have done instead.
        final_error_percent: error of the predicted loss of the last checkpoint, in percent of it; None without later.
    """

    fit: Fit
    later: Holdout | None
    carried: Holdout | None
    final_error_percent: float | None


def forecast(
    trajectory: Observations,
    *,
    until_tokens: float,
    penalty: float = 0.0,
    reference: Reference | None = None,
    huber_delta: float = 0.05,
) -> Forecast:
    """Fit B_l D_l^-beta_l + C' to a trajectory's checkpoints up to ``until_tokens`` and predict the later ones.

    Here the one-sided penalty is of use: a ``reference`` from complete trajectories (:func:`reference_exponent`) keeps
    a short prefix from bending too fast. Intervals are none: the checkpoints of one trajectory share their noise.

    Args:
        trajectory: rows of one N and one D_s.
        until_tokens: the largest D_l that is fitted.
        penalty: lambda; 1 held well on public trajectories.
        reference: the exponent above which it acts; needed for a penalty.
        huber_delta: where the loss turns linear, nats.

    Raises:
        NotEnoughObservationsError: fewer than three different D_l in the prefix.
        InvalidObservationsError: rows of several trajectories, or a penalty without a reference.
    """
    if penalty and reference is None:
        raise InvalidObservationsError("a penalty on one trajectory needs a reference from others")
    seen = trajectory.long_tokens <= until_tokens
    rows_of(TRAJECTORY, trajectory, Residual.LINEAR)
    prefix = trajectory.subset(seen)
    later = trajectory.subset(~seen)
    fitted = fit(
        TRAJECTORY,
        prefix,
        huber_delta=huber_delta,
        bootstrap_draws=0,
        penalty=penalty,
        references=(reference,) if reference is not None else (),
    )
    if not len(later):
        return Forecast(fit=fitted, later=None, carried=None, final_error_percent=None)
    predicted = law_values(TRAJECTORY, fitted.parameters, *later.sizes.T)
    last = prefix.log_longppl[np.argmax(prefix.long_tokens)]
    end = int(np.argmax(later.long_tokens))
    measured = float(later.log_longppl[end])
    return Forecast(
        fit=fitted,
        later=score(predicted, later.log_longppl),
        carried=score(np.full(len(later), last), later.log_longppl),
        final_error_percent=100 * (float(predicted[end]) - measured) / abs(measured) if measured else None,
    )


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
