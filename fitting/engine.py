"""The optimiser of every fit. Replace this module to replace the engine; nothing else knows it.

A search starts from a lattice of exponents (:mod:`fitting.lattice`), descends by variable projection
(:mod:`fitting.varpro`) and ends in Newton's method (:mod:`fitting.newton`), whose gradient certifies the optimum. Many
sets of weights are refitted at once. For unit weights the objective is the ``cost`` of
``scipy.optimize.least_squares(loss="huber", f_scale=delta)``.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fitting import absolute, lattice, newton, varpro
from fitting.basis import Basis
from fitting.laws import Offset
from fitting.newton import Certificate
from fitting.objective import Objective
from fitting.objective import huber as huber
from fitting.values import FloatArray

_SEARCH_SHARE = 1e-6
_REFIT_SHARE = 1e-4
_SAME = 1e-6
# The part of the objective that a descent may leave to gain; a search's end is polished afterwards.
_SEARCH_ARRIVED = 1e-6
_REFIT_ARRIVED = 1e-11
_CANDIDATES = 3
# Residuals this many times delta are far beyond it.
_FAR = 3.0
_TRIALS = 25
# Numbers held at once per array of a batch: bounds the memory of large bootstraps to some hundred megabytes.
_BATCH = 3_000_000
# More rows than this take no part in choosing among the optima: the starts descend over as many of them.
_SEARCHED_ROWS = 20_000
# Least absolute deviations are resampled with the Huber loss of this share of the median residual.
_ABSOLUTE_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """What is minimised.

    Attributes:
        basis: the rows' coordinates.
        log_longppl: the measured losses y (n).
        weights: m (n), how often each row counts.
        huber_delta: where the loss turns linear; zero for least absolute deviations.
        lower: lower bounds of theta.
        upper: upper bounds of theta.
        varied: the size of which terms varies; any other term is held at zero.
        log_residual: whether residuals are differences of logarithms.
        strength: lambda of the one-sided penalty.
        references: exponents above which it acts, infinite elsewhere; one per component of theta.
        usable: which components of theta have an effect.
    """

    basis: Basis
    log_longppl: FloatArray
    weights: FloatArray
    huber_delta: float
    lower: FloatArray
    upper: FloatArray
    varied: NDArray[np.bool_]
    log_residual: bool = False
    strength: float = 0.0
    references: FloatArray | None = None
    usable: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        law = self.basis.law
        usable = np.ones(law.n_parameters, dtype=np.bool_)
        for term, varied in zip(law.terms, self.varied, strict=True):
            usable[[term.amplitude, term.exponent]] = varied
            if term.rate is not None:
                usable[term.rate] = varied
        for position, i, j in law.interactions:
            usable[position] = self.varied[i] and self.varied[j]
        object.__setattr__(self, "usable", usable)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Optimum:
    """Where a search ended.

    Attributes:
        theta: the point, in the coordinates of the basis.
        objective: the objective there, penalty included.
        gradient_norm: largest absolute gradient component that does not push against a bound.
        converged: whether that gradient vanishes to within rounding.
        on_bound: which components lie exactly on a bound.
        n_starts: descents made.
        agreement: share of them that ended within 1e-6 of the best.
    """

    theta: FloatArray
    objective: float
    gradient_norm: float
    converged: bool
    on_bound: NDArray[np.bool_]
    n_starts: int
    agreement: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refits:
    """Optima of one problem under many sets of weights.

    Attributes:
        thetas: the points (R x P).
        objectives: the objective at each (R).
        converged: which of them converged (R).
    """

    thetas: FloatArray
    objectives: FloatArray
    converged: NDArray[np.bool_]


def search(problem: Problem) -> Optimum:
    """The best optimum found from many starts."""
    target = _objective(problem, problem.weights[None, :])
    sample = _sampled(target)
    start, left = lattice.starts(sample)
    # reweighting crawls where delta is far below the residuals
    loose = replace(sample, huber_delta=left) if _FAR * target.huber_delta < left else sample
    many = _repeated(loose, len(start))
    ends, reached = varpro.descend(many, _points(problem, start), arrived=_SEARCH_ARRIVED)
    best = reached.min()
    agreement = float((reached <= best * (1 + _SAME) + _rounding(problem)).mean())
    candidates = ends[_distinct(reached)]
    if sample is not target:
        whole = _repeated(replace(target, huber_delta=loose.huber_delta), len(candidates))
        candidates, _ = varpro.descend(whole, candidates, arrived=_SEARCH_ARRIVED)
    stepwise = target.huber_delta < 2 * left
    polished = newton.polish(_repeated(target, len(candidates)), candidates, stepwise=stepwise)
    end = polished[0 if len(candidates) == 1 else int(np.nanargmin(polished.value))]
    end = _settle(problem, target, _reconsidered(problem, target, end))
    theta, value, gradient_norm = end.theta[0], float(end.value[0]), float(np.abs(end.gradient).max())
    converged = bool(end.converged(_SEARCH_SHARE)[0])
    if problem.huber_delta == 0:
        corner = absolute.descend(target, theta)
        theta, value, gradient_norm, converged = corner.theta, corner.value, corner.gradient_norm, corner.converged
    on_bound = (theta <= problem.lower) | (theta >= problem.upper)
    return Optimum(
        theta=theta,
        objective=value,
        gradient_norm=gradient_norm,
        converged=converged,
        on_bound=on_bound,
        n_starts=len(start),
        agreement=agreement,
    )


def refit(
    problem: Problem, weights: FloatArray, start: FloatArray, *, searched: bool = False, settled: bool = False
) -> Refits:
    """Optima under each row of ``weights`` (R x n), all started from the point ``start``.

    Those that end on a bound are started once more from the lattice, and so are all where ``searched``.

    Args:
        problem: the problem; its own weights take no part.
        weights: m, one set per refit.
        start: a point (P), or one per refit (R x P).
        searched: whether every refit looks at the lattice too.
        settled: whether every refit ends in Newton's method.
    """
    batch = max(1, _BATCH // (weights.shape[1] * (len(start.T) + 1)))
    parts = []
    for k in range(0, len(weights), batch):
        target = _objective(problem, weights[k : k + batch])
        warm = start if start.ndim == 1 else start[k : k + batch]
        parts.append(_solve(problem, target, warm, searched=searched, settled=settled))
    if not parts:
        return Refits(thetas=np.empty((0, start.shape[-1])), objectives=np.empty(0), converged=np.empty(0, np.bool_))
    return Refits(
        thetas=np.concatenate([part.thetas for part in parts]),
        objectives=np.concatenate([part.objectives for part in parts]),
        converged=np.concatenate([part.converged for part in parts]),
    )


def refit_fixed(problem: Problem, component: int, values: FloatArray) -> Refits:
    """Optima with one exponent, or the free offset, held at each of several values: from the lattice, then one another.

    With the offset held, points are those of the law without it and in other coordinates: read the objectives alone.
    """
    law, offset = problem.basis.law, None
    if component == law.n_parameters - 1 and law.offset is Offset.FREE:
        offset = values[:, None]
        problem = replace(
            problem,
            basis=replace(problem.basis, law=law.without_offset()),
            lower=problem.lower[:-1],
            upper=problem.upper[:-1],
            references=None if problem.references is None else problem.references[:-1],
        )
    lower, upper = (np.tile(bound, (len(values), 1)) for bound in (problem.lower, problem.upper))
    if offset is None:
        lower[:, component] = upper[:, component] = values
    target = replace(
        _objective(problem, np.tile(problem.weights, (len(values), 1))), lower=lower, upper=upper, offset=offset
    )
    start = _points(problem, lattice.best_points(target))
    best = _solve(problem, target, start, searched=False, settled=True)
    # optima of near values lie near each other: one that a descent from the lattice missed is found from its neighbour
    order = np.argsort(values)
    for _ in range(len(values)):
        improved = False
        for along in (order, order[::-1]):
            start = best.thetas.copy()
            start[along[1:]] = best.thetas[along[:-1]]
            other = _solve(problem, target, start, searched=False, settled=True)
            better = other.objectives < best.objectives * (1 - 1e-9)
            improved |= bool(better.any())
            best.thetas[better], best.objectives[better] = other.thetas[better], other.objectives[better]
            best.converged[better] = other.converged[better]
        if not improved:
            break
    return best


def _solve(problem: Problem, target: Objective, start: FloatArray, *, searched: bool, settled: bool) -> Refits:
    warm = np.broadcast_to(start, (len(target), start.shape[-1]))
    loose = _loosened(target, warm)
    ends, reached = varpro.descend(loose, warm, arrived=_REFIT_ARRIVED)
    again = np.flatnonzero(np.full(len(ends), searched) | _touching(problem, target, ends))
    if len(again):
        points = _points(problem, lattice.best_points(target.pick(again)))
        other, value = varpro.descend(loose.pick(again), points, arrived=_REFIT_ARRIVED)
        better = value < reached[again]
        ends[again[better]] = other[better]
    if settled or target.log_residual or loose.huber_delta > target.huber_delta:
        known = newton.polish(target, ends)
    else:
        known = newton.certify(target, ends)
    unfinished = np.flatnonzero(~_converged(known))
    if len(unfinished):
        ends = known.theta.copy()
        ends[unfinished] = newton.polish(target.pick(unfinished), ends[unfinished]).theta
        known = newton.certify(target, ends)
    return Refits(thetas=known.theta, objectives=known.value, converged=_converged(known))


def _converged(known: Certificate) -> NDArray[np.bool_]:
    converged: NDArray[np.bool_] = known.converged(_REFIT_SHARE) & np.isfinite(known.theta).all(axis=1)
    return converged


def _objective(problem: Problem, weights: FloatArray) -> Objective:
    basis, delta = problem.basis, problem.huber_delta
    objective = Objective(
        basis=basis,
        y=problem.log_longppl,
        weights=weights,
        huber_delta=delta,
        lower=problem.lower,
        upper=problem.upper,
        usable=problem.usable,
        log_residual=problem.log_residual,
        strength=problem.strength,
        references=np.full(basis.law.n_parameters, np.inf) if problem.references is None else problem.references,
    )
    if delta > 0:
        return objective
    one = objective.pick(np.arange(1))
    least = varpro.solve_linear(_least_squares(one), lattice.best_points(one))
    return replace(objective, huber_delta=max(_ABSOLUTE_SHARE * _typical(one, least), 1e-12))


def _sampled(objective: Objective) -> Objective:
    """The objective over some of the rows of a long table, always the same ones."""
    n = len(objective.y)
    if n <= _SEARCHED_ROWS:
        return objective
    return objective.rows(np.sort(np.random.default_rng(0).permutation(n)[:_SEARCHED_ROWS]))


def _least_squares(objective: Objective) -> Objective:
    return replace(objective, huber_delta=1e300)


def _typical(objective: Objective, thetas: FloatArray) -> float:
    residuals = np.abs(objective.residuals(objective.basis.values(thetas)))
    finite = residuals[np.isfinite(residuals)]
    return float(np.median(finite)) if len(finite) else 0.0


def _loosened(objective: Objective, thetas: FloatArray) -> Objective:
    """The objective with delta no smaller than its residuals: reweighting crawls below."""
    return replace(objective, huber_delta=max(objective.huber_delta, 1.5 * _typical(objective, thetas)))


def _repeated(objective: Objective, times: int) -> Objective:
    return objective.pick(np.zeros(times, dtype=np.intp))


def _points(problem: Problem, nonlinear: FloatArray) -> FloatArray:
    points = np.zeros((len(nonlinear), problem.basis.law.n_parameters))
    points[:, problem.basis.nonlinear] = nonlinear
    return points


def _distinct(reached: FloatArray) -> NDArray[np.intp]:
    """Positions of the best ends that differ in their objective, best first, few."""
    order = np.argsort(reached, kind="stable")
    chosen = [order[0]]
    for k in order[1:]:
        if len(chosen) == _CANDIDATES:
            break
        if reached[k] > reached[chosen[-1]] * (1 + _SAME) + 1e-30 and reached[k] < 1.5 * reached[order[0]]:
            chosen.append(k)
    return np.array(chosen)


def _touching(problem: Problem, objective: Objective, thetas: FloatArray) -> NDArray[np.bool_]:
    """Which points have an amplitude at zero or an exponent at a bound."""
    movable = problem.usable & (objective.lower < objective.upper)
    touching: NDArray[np.bool_] = np.any(((thetas <= objective.lower) | (thetas >= objective.upper)) & movable, axis=1)
    return touching


def _rounding(problem: Problem) -> float:
    scale = 1.0 if problem.log_residual else float(np.abs(problem.log_longppl).max())
    return float(problem.weights.sum() * (1e-13 * scale) ** 2)


def _reconsidered(problem: Problem, target: Objective, end: Certificate) -> Certificate:
    """The point, or a better one in which a term is present that it lacks.

    An absent term's exponent says nothing of others: where adding the term at one of them lowers the objective, a
    descent starts there.
    """
    basis = problem.basis
    for term in basis.law.terms:
        if end.theta[0, term.amplitude] > 0 or not problem.usable[term.amplitude]:
            continue
        trials = np.repeat(end.theta, _TRIALS, axis=0)
        trials[:, term.exponent] = np.geomspace(problem.lower[term.exponent], problem.upper[term.exponent], _TRIALS)
        slopes = newton.slopes(_repeated(target, _TRIALS), trials)[:, term.amplitude]
        steepest = int(np.argmin(slopes))
        if slopes[steepest] >= 0:
            continue
        start = trials[steepest : steepest + 1]
        other = newton.polish(target, varpro.descend(target, start, arrived=_REFIT_ARRIVED)[0])
        if other.value[0] < end.value[0]:
            end = other
    return end


def _settle(problem: Problem, target: Objective, end: Certificate) -> Certificate:
    """Terms that contribute no more than rounding put to zero, all together or one by one, where that costs nothing."""
    law, basis = problem.basis.law, problem.basis
    theta, value = end.theta[0], float(end.value[0])
    columns = np.abs(basis.design(theta[basis.nonlinear])).max(axis=-1)
    effect = dict(zip(basis.linear, theta[basis.linear] * columns, strict=True))
    negligible = 1e-6 * float(np.abs(problem.log_longppl).max())
    tiny = [term.amplitude for term in law.terms if 0 < effect[term.amplitude] < negligible]
    if law.interactions or not tiny:
        return end
    for group in (tiny, *([k] for k in tiny)):
        usable = target.usable.copy()
        start = end.theta.copy()
        for k in group:
            usable[k] = usable[k + 1] = False
            start[0, k] = 0.0
        settled = newton.polish(replace(target, usable=usable), start)
        if settled.value[0] <= value * (1 + 1e-12) + _rounding(problem):
            # the gradient of the terms put to zero counts too
            end = newton.certify(target, settled.theta)
            value = float(end.value[0])
    return end
