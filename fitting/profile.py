"""Profile intervals: how far an exponent or the offset can be moved, everything else refitted, before the fit suffers.

For independent noise the objective rises by at most s F(1, n - p)/2 within the interval, with s = E[psi^2]/E[psi'] of
the Huber loss's derivative psi (Schrader and Hettmansperger, Biometrika 67, 1980); for squared residuals s is their
variance and this a likelihood ratio. Rows that share a short checkpoint's noise make it too narrow; the cluster
bootstrap does not.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import f as f_distribution

from fitting import engine
from fitting.engine import Problem
from fitting.errors import InvalidObservationsError
from fitting.laws import Law, Offset, law_named
from fitting.observations import Observations
from fitting.rows import Procedure, problem_of, rows_of
from fitting.values import FloatArray, Interval, Loss, Residual

_STEPS = 33
_REFINED = 9
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Profile:
    """The objective along one parameter.

    Attributes:
        parameter: its name.
        values: where it was held, ascending.
        objectives: the least objective there.
        threshold: the objective at the ends of the interval.
        interval: where the objective stays below it; None where there are no degrees of freedom.
        open_low: whether the interval ends only because the search does.
        open_high: likewise above.
    """

    parameter: str
    values: FloatArray
    objectives: FloatArray
    threshold: float
    interval: Interval | None
    open_low: bool
    open_high: bool


def profile(
    law: Law | str,
    observations: Observations,
    parameter: str,
    *,
    huber_delta: float = 0.05,
    residual: Residual = Residual.LINEAR,
    level: float = 0.9,
) -> Profile:
    """The profile of an exponent or of the offset, and its interval.

    Raises:
        InvalidObservationsError: the parameter is neither, or the rows cannot be fitted.
        NotEnoughObservationsError: fewer distinct points than parameters.
    """
    law = law_named(law) if isinstance(law, str) else law
    procedure = Procedure(huber_delta=huber_delta, residual=residual, loss=Loss.HUBER, level=level)
    names = list(law.parameter_names)
    known = profiled(law)
    if parameter not in known:
        raise InvalidObservationsError(f"there is no profile of {parameter}; profiles exist of {', '.join(known)}")
    rows = rows_of(law, observations, residual)
    problem = problem_of(law, rows, procedure)
    found = engine.search(problem)
    component = names.index(parameter)
    centre = float(problem.basis.to_parameters(found.theta)[component])
    spare = len(rows.y) - law.n_parameters
    residuals = problem.basis.values(found.theta) - rows.y
    if residual is Residual.LOG:
        residuals = np.log1p(residuals / rows.y)
    scale = _scale(residuals, rows.weights, huber_delta) * len(rows.y) / spare if spare > 0 else np.inf
    threshold = found.objective + 0.5 * scale * float(f_distribution.ppf(level, 1, max(spare, 1)))

    if component == law.n_parameters - 1:
        span = 4 * float(np.abs(rows.y).max()) + abs(centre)
        low, high = centre - span, min(centre + span, float(rows.y.max()))
    else:
        low, high = float(problem.lower[component]), float(problem.upper[component])
    down, up = (
        _walk(
            problem, component, centre, end, threshold, values=np.array([centre]), reached=np.array([found.objective])
        )
        for end in (low, high)
    )
    values, order = np.unique(np.concatenate([down.values, up.values]), return_index=True)
    return Profile(
        parameter=parameter,
        values=values,
        objectives=np.concatenate([down.objectives, up.objectives])[order],
        threshold=threshold,
        interval=Interval(low=down.end, high=up.end) if spare > 0 else None,
        open_low=down.is_open,
        open_high=up.is_open,
    )


def _scale(residuals: FloatArray, weights: FloatArray, delta: float) -> float:
    """E[psi^2]/E[psi'] of the Huber loss at these residuals.

    psi' is one within delta. Few residuals lie within a small delta, so their share is read off a wider window.
    """
    size = np.abs(residuals)
    window = max(delta, float(np.median(size)))
    inside = delta / window * float(np.average(size <= window, weights=weights))
    return float((weights * np.minimum(size, delta) ** 2).mean()) / inside


def profiled(law: Law) -> list[str]:
    """The parameters that a profile exists of.

    Of amplitudes there is none: held, they tie their exponent so closely that each value asks for a search of its own.
    """
    exponents = [law.parameter_names[term.exponent] for term in law.terms]
    offset = law.offset is Offset.FREE and not law.interactions
    return exponents + ([law.parameter_names[-1]] if offset else [])


def profiles_of(
    law: Law, observations: Observations, *, huber_delta: float, residual: Residual, level: float
) -> tuple[Profile, ...]:
    """All of them; see :func:`profile`."""
    return tuple(
        profile(law, observations, name, huber_delta=huber_delta, residual=residual, level=level)
        for name in profiled(law)
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Side:
    values: FloatArray
    objectives: FloatArray
    end: float
    is_open: bool


def _walk(
    problem: Problem,
    component: int,
    centre: float,
    limit: float,
    threshold: float,
    *,
    values: FloatArray,
    reached: FloatArray,
) -> _Side:
    """Hold the parameter ever farther from its best value, then ever closer to where the threshold is crossed."""
    trials = centre + (limit - centre) * np.linspace(0, 1, _STEPS)[1:] ** 2
    for _ in range(_ROUNDS):
        values = np.append(values, trials)
        reached = np.append(reached, engine.refit_fixed(problem, component, trials).objectives)
        order = np.argsort(np.abs(values - centre), kind="stable")
        values, reached = values[order], reached[order]
        above = np.flatnonzero(reached > threshold)
        if not len(above):
            return _Side(values=values, objectives=reached, end=limit, is_open=True)
        near, far = values[above[0] - 1], values[above[0]]
        trials = np.linspace(near, far, _REFINED)[1:-1]
    # the square root of the rise is nearly linear
    rise = np.sqrt(np.maximum(reached[above[0] - 1 : above[0] + 1] - reached.min(), 0.0))
    share = (np.sqrt(threshold - reached.min()) - rise[0]) / (rise[1] - rise[0])
    return _Side(values=values, objectives=reached, end=float(near + share * (far - near)), is_open=False)
