"""The joint fit: one law, all observations, its intervals and what it cannot know."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitting import bootstrap, engine, identifiability
from fitting.basis import AMPLITUDES, EXPONENTS, Basis
from fitting.bootstrap import Resampling
from fitting.engine import Optimum, Problem
from fitting.errors import InvalidObservationsError, NotEnoughObservationsError
from fitting.holdout import evaluate, mape_percent, r_squared
from fitting.identifiability import Identifiability
from fitting.laws import Law, law_named
from fitting.observations import Observations
from fitting.predict import log_longppl
from fitting.values import AXIS_SYMBOLS, Fit, FloatArray, Status

FEW_CLUSTERS = 10
_NEARLY_COLLINEAR = 0.99
_OFTEN = 0.2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Rows:
    """Observations as arrays in an order that depends on their content alone."""

    sizes: FloatArray
    log_longppl: FloatArray
    cluster: NDArray[np.int64]


def fit(
    law: Law | str,
    observations: Observations,
    *,
    huber_delta: float = 0.05,
    bootstrap_draws: int = 200,
    seed: int = 0,
    level: float = 0.9,
    holdout: Observations | None = None,
) -> Fit:
    """Fit a law to observations by minimising the summed Huber loss of y, every row with the same weight.

    Exponents stay in [0.01, 2], amplitudes at or above zero, C is free. The same rows in another order give the same
    fit, bit for bit.

    Args:
        law: a law or its registered name.
        observations: the rows to fit.
        huber_delta: where the loss turns from quadratic to linear, nats.
        bootstrap_draws: refits of resampled clusters behind the intervals; 0 for none.
        seed: makes the resampling repeatable.
        level: nominal coverage of the intervals.
        holdout: rows to predict and compare, which take no part in the fit.

    Raises:
        UnknownLawError: no law of that name.
        NotEnoughObservationsError: fewer distinct points than parameters.
        InvalidObservationsError: a held-out set without a usable row, or a setting outside its range.
    """
    law = law_named(law) if isinstance(law, str) else law
    _check_settings(huber_delta, bootstrap_draws, level)
    if len(observations) == 0 or observations.n_distinct < law.n_parameters:
        raise NotEnoughObservationsError(law.n_parameters, observations.n_distinct if len(observations) else 0)
    if holdout is not None and len(holdout) == 0:
        raise InvalidObservationsError("no held-out row has a usable loss", holdout.excluded)

    rows = _in_order(observations)
    varied = identifiability.varied_axes(rows.sizes)
    problem = Problem(
        basis=Basis.of(rows.sizes, varied),
        log_longppl=rows.log_longppl,
        weights=np.ones(len(rows.log_longppl)),
        huber_delta=huber_delta,
        lower=np.array(law.lower),
        upper=np.array(law.upper),
        varied=varied,
    )
    found = engine.search(problem)
    known = identifiability.identify(problem.basis, found.theta, rows.sizes)
    resampling = bootstrap.resample(
        problem, found, rows.sizes, rows.cluster, rank=known.rank, n_draws=bootstrap_draws, seed=seed
    )

    parameters: tuple[float, ...] = tuple(problem.basis.to_parameters(found.theta).tolist())
    predicted = log_longppl(parameters, *rows.sizes.T)
    residuals = predicted - rows.log_longppl
    spare = len(residuals) - known.rank
    on_bound = found.on_bound & np.append(np.repeat(problem.varied, 2), True)
    on_bound[EXPONENTS] &= ~on_bound[AMPLITUDES]  # the exponent of an absent term is anywhere, not at its bound
    names = law.parameter_names
    return Fit(
        law=law.name,
        status=_status(problem, found, known),
        parameters=parameters,
        intervals=bootstrap.intervals(
            resampling.draws, level, withheld_for=(*known.open_parameters, *np.flatnonzero(on_bound).tolist())
        ),
        objective=float(engine.huber(residuals, huber_delta).sum()),
        gradient_norm=found.gradient_norm,
        huber_delta=huber_delta,
        level=level,
        seed=seed,
        n_observations=len(observations),
        n_clusters=observations.n_clusters,
        n_draws=bootstrap_draws,
        n_draws_ok=resampling.n_ok,
        draws=resampling.draws,
        residual_std=float(np.sqrt((residuals**2).sum() / spare)) if spare > 0 else None,
        r2=r_squared(predicted, rows.log_longppl),
        mape_log=mape_percent(predicted, rows.log_longppl),
        at_bound=tuple(names[k] for k in np.flatnonzero(on_bound)),
        not_identifiable=tuple(names[k] for k in known.open_parameters),
        jacobian_rank=known.rank,
        ranges=observations.ranges,
        excluded=observations.excluded + (holdout.excluded if holdout is not None else ()),
        warnings=_warnings(law, observations, problem, found, known, resampling),
        holdout=evaluate(parameters, holdout) if holdout is not None else None,
    )


def _check_settings(huber_delta: float, bootstrap_draws: int, level: float) -> None:
    if not huber_delta > 0:
        raise InvalidObservationsError(f"huber_delta is {huber_delta!r}; it must be positive")
    if bootstrap_draws < 0:
        raise InvalidObservationsError(f"bootstrap_draws is {bootstrap_draws!r}; it must be 0 or more")
    if not 0 < level < 1:
        raise InvalidObservationsError(f"level is {level!r}; it must lie between 0 and 1")


def _in_order(observations: Observations) -> _Rows:
    sizes = observations.sizes
    order = np.lexsort((observations.cluster, observations.log_longppl, *sizes.T[::-1]))
    return _Rows(sizes=sizes[order], log_longppl=observations.log_longppl[order], cluster=observations.cluster[order])


def _status(problem: Problem, found: Optimum, known: Identifiability) -> Status:
    absent = found.on_bound[AMPLITUDES] & problem.varied
    # the exponent of an absent term is open without anything being wrong with the observations
    accounted_for = {int(k) for k in EXPONENTS[absent]}
    if not found.converged:
        return Status.NOT_CONVERGED
    if set(known.open_parameters) - accounted_for:
        return Status.NOT_IDENTIFIABLE
    if absent.any():
        return Status.TERM_ABSENT
    if found.on_bound[EXPONENTS].any():
        return Status.AT_BOUND
    return Status.CONVERGED


def _warnings(
    law: Law,
    observations: Observations,
    problem: Problem,
    found: Optimum,
    known: Identifiability,
    resampling: Resampling,
) -> tuple[str, ...]:
    names = law.parameter_names
    warnings: list[str] = []
    if not found.converged:
        warnings.append(f"the optimiser stopped with a gradient of {found.gradient_norm:.1e}: do not use this fit")
    for symbol, varied, values in zip(AXIS_SYMBOLS, problem.varied, observations.sizes.T, strict=True):
        if not varied:
            warnings.append(f"{symbol} has one value in all observations: its term cannot be told from C")
        elif len(np.unique(values)) == 2:
            warnings.append(f"{symbol} has two values in all observations: an exponent needs three")
    for i, j, correlation in identifiability.axis_correlations(observations.sizes):
        if abs(correlation) > _NEARLY_COLLINEAR:
            pair = f"{AXIS_SYMBOLS[i]} and {AXIS_SYMBOLS[j]}"
            warnings.append(f"{pair} move together (correlation {correlation:.4f}): their terms are hard to tell apart")
    if known.open_parameters:
        listed = ", ".join(names[k] for k in known.open_parameters)
        warnings.append(f"not identifiable (rank {known.rank} of {law.n_parameters}): {listed}")
    for axis, amplitude in enumerate(AMPLITUDES):
        if found.on_bound[amplitude] and problem.varied[axis]:
            warnings.append(f"{names[amplitude]} is zero: these observations show no effect of {AXIS_SYMBOLS[axis]}")
    for exponent in EXPONENTS:
        if found.on_bound[exponent] and not found.on_bound[exponent - 1]:
            warnings.append(f"{names[exponent]} ended at the bound {found.theta[exponent]:g} of its range")
    for repeated in observations.repeated_rows():
        warnings.append(f"rows {', '.join(map(str, repeated))} repeat one another and count as often as they appear")
    return (*warnings, *_resampling_warnings(observations.n_clusters, resampling))


def _resampling_warnings(n_clusters: int, resampling: Resampling) -> list[str]:
    if resampling.n_draws == 0:
        return ["no intervals: no resampling was asked for"]
    warnings: list[str] = []
    if resampling.withheld:
        warnings.append(
            f"intervals withheld: {resampling.n_ok} of {resampling.n_draws} refits of {n_clusters} clusters were good; "
            f"it takes {bootstrap.MIN_OK_SHARE:.0%}, {bootstrap.MIN_DRAWS} refits and {bootstrap.MIN_CLUSTERS} clusters"
        )
    elif resampling.n_ok < resampling.n_draws:
        warnings.append(f"{resampling.n_ok} of {resampling.n_draws} refits were good; intervals rest on those")
    if resampling.n_at_bound > _OFTEN * resampling.n_draws:
        warnings.append(
            f"in {resampling.n_at_bound} of {resampling.n_ok} good refits a term vanished or an exponent met its bound"
        )
    if n_clusters < FEW_CLUSTERS:
        warnings.append(f"only {n_clusters} clusters (short checkpoints) to resample: intervals are rough")
    return warnings
