"""The joint fit: one law, all observations, its intervals and what it cannot know."""

from dataclasses import replace
from typing import Literal

import numpy as np

from fitting import bootstrap, engine, identifiability
from fitting.engine import Optimum, Problem
from fitting.errors import InvalidObservationsError
from fitting.holdout import evaluate, mape_percent, r_squared
from fitting.laws import Law, law_named
from fitting.notes import resampling_warnings, status_of, warnings_of
from fitting.observations import Observations
from fitting.penalty import penalty_of
from fitting.predict import law_values
from fitting.rows import Procedure, Rows, problem_of, rows_of
from fitting.values import Fit, FloatArray, Loss, Penalty, Reference, Resampled, Residual, Slicing


def fit(
    law: Law | str,
    observations: Observations,
    *,
    huber_delta: float = 0.05,
    bootstrap_draws: int = 200,
    seed: int = 0,
    level: float = 0.9,
    holdout: Observations | None = None,
    loss: Loss = Loss.HUBER,
    residual: Residual = Residual.LINEAR,
    resampled: Resampled = Resampled.CLUSTERS,
    searched: bool = False,
    penalty: float | Literal["auto"] = 0.0,
    references: tuple[Reference, ...] | Slicing = Slicing.OFFSET,
) -> Fit:
    """Fit a law to observations by minimising the summed loss of the residuals.

    Every row has the same weight, unless the observations have standard errors: then m = 1/se^2, scaled to a mean of
    one. Exponents stay in [0.01, 2], amplitudes at or above zero, the offset as the law has it. The same rows in
    another order give the same fit, bit for bit.

    Args:
        law: a law or its registered name.
        observations: the rows to fit.
        huber_delta: where the Huber loss turns from quadratic to linear, in nats or, for logarithms, relative.
        bootstrap_draws: refits of resampled clusters behind the intervals; 0 for none.
        seed: makes the resampling repeatable.
        level: nominal coverage of the intervals.
        holdout: rows to predict and compare, which take no part in the fit.
        loss: Huber, or its limit, least absolute deviations.
        residual: whether the loss or its logarithm is compared.
        resampled: whether the bootstrap draws clusters or single rows.
        searched: whether every refit searches all starts, not only the fit itself.
        penalty: lambda of the one-sided penalty on the token exponents, or "auto" to choose it by predicting the
            largest training scale from the others.
        references: the exponents above which the penalty acts, or how to find them in slices.

    Raises:
        UnknownLawError: no law of that name.
        NotEnoughObservationsError: fewer distinct points than parameters.
        InvalidObservationsError: a held-out set without a usable row, rows that the law or the residual cannot take, a
            penalty on a law without exponents to penalise, or a setting outside its range.
    """
    law = law_named(law) if isinstance(law, str) else law
    procedure = Procedure(
        huber_delta=huber_delta,
        loss=loss,
        residual=residual,
        bootstrap_draws=bootstrap_draws,
        seed=seed,
        level=level,
        resampled=resampled,
        searched=searched,
    )
    if holdout is not None and len(holdout) == 0:
        raise InvalidObservationsError("no held-out row has a usable loss", holdout.excluded)
    rows = rows_of(law, observations, residual)
    used, said = penalty_of(law, observations, procedure, penalty, references)
    fitted = _fitted(law, observations, rows, procedure, used, holdout, said)
    if used.strength == 0:
        return fitted
    plain = _fitted(law, observations, rows, replace(procedure, bootstrap_draws=0), Penalty(), holdout, [])
    return replace(fitted, unpenalised=plain)


def _fitted(
    law: Law,
    observations: Observations,
    rows: Rows,
    procedure: Procedure,
    penalty: Penalty,
    holdout: Observations | None,
    said: list[str],
) -> Fit:
    problem = problem_of(law, rows, procedure, penalty)
    found = engine.search(problem)
    known = identifiability.identify(problem.basis, found.theta, weights=rows.weights, usable=problem.usable)
    drawn = rows.cluster if procedure.resampled is Resampled.CLUSTERS else np.arange(len(rows.y), dtype=np.int64)
    resampling = bootstrap.resample(
        problem,
        found,
        rows.sizes,
        drawn,
        rank=known.rank,
        n_draws=procedure.bootstrap_draws,
        seed=procedure.seed,
        searched=procedure.searched,
    )
    names = law.parameter_names
    penalty = replace(penalty, binds=_binding(problem, found))
    parameters: tuple[float, ...] = tuple(problem.basis.to_parameters(found.theta).tolist())
    predicted = law_values(law, parameters, *rows.sizes.T)
    squares = float((rows.weights * (predicted - rows.y) ** 2).sum())
    spare = len(rows.y) - known.rank
    on_bound = found.on_bound & problem.usable
    for term in law.terms:  # the exponent of an absent term is anywhere, not at its bound
        if on_bound[term.amplitude]:
            on_bound[term.exponent] = False
    withheld = {*known.open_parameters, *np.flatnonzero(on_bound).tolist()}
    if penalty.binds:
        withheld.add(law.n_parameters - 1)
    n_groups = len(np.unique(drawn))
    return Fit(
        law=law.name,
        status=status_of(problem, found, known),
        parameters=parameters,
        intervals=bootstrap.intervals(resampling.draws, procedure.level, withheld_for=tuple(withheld)),
        objective=_objective(problem, predicted),
        gradient_norm=found.gradient_norm,
        huber_delta=procedure.huber_delta,
        level=procedure.level,
        seed=procedure.seed,
        n_observations=len(observations),
        n_clusters=observations.n_clusters,
        n_draws=procedure.bootstrap_draws,
        n_draws_ok=resampling.n_ok,
        draws=resampling.draws,
        residual_std=float(np.sqrt(squares / spare)) if spare > 0 else None,
        r2=r_squared(predicted, rows.y),
        mape_log=mape_percent(predicted, rows.y),
        at_bound=tuple(names[k] for k in np.flatnonzero(on_bound)),
        not_identifiable=tuple(names[k] for k in known.open_parameters),
        jacobian_rank=known.rank,
        ranges=observations.ranges,
        excluded=observations.excluded + (holdout.excluded if holdout is not None else ()),
        warnings=(
            *said,
            *warnings_of(observations, problem, found, known, penalty),
            *resampling_warnings(n_groups, resampling, procedure.resampled),
        ),
        holdout=evaluate(parameters, holdout, law) if holdout is not None else None,
        loss=procedure.loss,
        residual=procedure.residual,
        resampled=procedure.resampled,
        n_starts=found.n_starts,
        agreement=found.agreement,
        condition_number=known.condition if np.isfinite(known.condition) else None,
        penalty=penalty,
    )


def _objective(problem: Problem, predicted: FloatArray) -> float:
    """The summed loss of the rows, without the penalty."""
    residual = np.log(predicted / problem.log_longppl) if problem.log_residual else predicted - problem.log_longppl
    if problem.huber_delta == 0:
        return float(problem.weights @ np.abs(residual))
    return float((problem.weights * engine.huber(residual, problem.huber_delta)).sum())


def _binding(problem: Problem, found: Optimum) -> tuple[str, ...]:
    if problem.strength == 0 or problem.references is None:
        return ()
    above = (found.theta > problem.references) & problem.usable
    return tuple(problem.basis.law.parameter_names[k] for k in np.flatnonzero(above))
