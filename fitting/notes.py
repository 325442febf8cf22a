"""The status of a fit and the warnings that go with its numbers."""

import numpy as np

from fitting import bootstrap
from fitting.bootstrap import Resampling
from fitting.engine import Optimum, Problem
from fitting.identifiability import Identifiability
from fitting.laws import Law, Term
from fitting.observations import Observations
from fitting.values import Penalty, Resampled, Status

FEW_CLUSTERS = 10
_NEARLY_COLLINEAR = 0.99
_OFTEN = 0.2
_SHOWN = 10
_EXACT = 2.0**53


def status_of(problem: Problem, found: Optimum, known: Identifiability) -> Status:
    """How the fit ended; the first that applies in the order of :class:`Status`."""
    terms = [term for term, varied in zip(problem.basis.law.terms, problem.varied, strict=True) if varied]
    absent = [term for term in terms if found.on_bound[term.amplitude]]
    # the exponent of an absent term is open without anything being wrong with the observations
    accounted_for = {k for term in absent for k in (term.exponent, term.rate)}
    if not found.converged:
        return Status.NOT_CONVERGED
    if set(known.open_parameters) - accounted_for:
        return Status.NOT_IDENTIFIABLE
    if absent:
        return Status.TERM_ABSENT
    if found.on_bound.any():
        return Status.AT_BOUND
    return Status.CONVERGED


def warnings_of(
    observations: Observations,
    problem: Problem,
    found: Optimum,
    known: Identifiability,
    penalty: Penalty,
) -> list[str]:
    """What a reader of the parameters should know."""
    law = problem.basis.law
    names = law.parameter_names
    warnings: list[str] = []
    if not found.converged:
        warnings.append(f"the optimiser stopped with a gradient of {found.gradient_norm:.1e}: do not use this fit")
    inputs = law.term_sizes(observations.sizes)
    for term, varied, values in zip(law.terms, problem.varied, inputs.T, strict=True):
        if not varied:
            warnings.append(f"{_called(law, term)} has one value in all observations: its term cannot be told from C")
        elif len(np.unique(values)) == 2:
            warnings.append(f"{_called(law, term)} has two values in all observations: an exponent needs three")
    for i, j, correlation in known.correlations:
        if abs(correlation) > _NEARLY_COLLINEAR:
            pair = f"{_called(law, law.terms[i])} and {_called(law, law.terms[j])}"
            warnings.append(f"{pair} move together (correlation {correlation:.4f}): their terms are hard to tell apart")
    if known.open_parameters:
        listed = ", ".join(names[k] for k in known.open_parameters)
        warnings.append(f"not identifiable (rank {known.rank} of {law.n_parameters}): {listed}")
    for term, varied in zip(law.terms, problem.varied, strict=True):
        if found.on_bound[term.amplitude] and varied:
            warnings.append(
                f"{names[term.amplitude]} is zero: these observations show no effect of {_called(law, term)}"
            )
        elif found.on_bound[term.exponent] and varied:
            value = found.theta[term.exponent]
            warnings.append(f"{names[term.exponent]} ended at the bound {value:g} of its range")
    if penalty.binds:
        warnings.append(
            f"the penalty (lambda {penalty.strength:g}) holds {', '.join(penalty.binds)} down: "
            f"{names[-1]} is not interpretable; read the fit without penalty beside it"
        )
    rounded = np.flatnonzero((observations.sizes >= _EXACT).any(axis=1)).tolist()
    if rounded:
        shown = ", ".join(str(observations.row_ids[i]) for i in rounded[:_SHOWN])
        shown += ", ..." if len(rounded) > _SHOWN else ""
        warnings.append(f"rows {shown} have counts of 2^53 or more, which float64 rounds")
    repeated = observations.repeated_rows()
    for rows in repeated[:_SHOWN]:
        shown = ", ".join(map(str, rows[:_SHOWN])) + (", ..." if len(rows) > _SHOWN else "")
        warnings.append(f"rows {shown} repeat one another and count as often as they appear")
    if len(repeated) > _SHOWN:
        warnings.append(f"and {len(repeated) - _SHOWN} more groups of rows repeat one another")
    return warnings


def resampling_warnings(n_clusters: int, resampling: Resampling, resampled: Resampled) -> list[str]:
    """What a reader of the intervals should know."""
    if resampling.n_draws == 0:
        return ["no intervals: no resampling was asked for"]
    warnings: list[str] = []
    drawn = "clusters" if resampled is Resampled.CLUSTERS else "rows"
    if resampling.withheld:
        warnings.append(
            f"intervals withheld: {resampling.n_ok} of {resampling.n_draws} refits of {n_clusters} {drawn} were good; "
            f"it takes {bootstrap.MIN_OK_SHARE:.0%}, {bootstrap.MIN_DRAWS} refits and {bootstrap.MIN_CLUSTERS} {drawn}"
        )
    elif resampling.n_ok < resampling.n_draws:
        warnings.append(f"{resampling.n_ok} of {resampling.n_draws} refits were good; intervals rest on those")
    if resampling.n_at_bound > _OFTEN * resampling.n_draws:
        warnings.append(
            f"in {resampling.n_at_bound} of {resampling.n_ok} good refits a term vanished or an exponent met its bound"
        )
    if resampled is Resampled.ROWS:
        warnings.append("rows were resampled one by one: intervals are too narrow where rows share a short checkpoint")
    elif n_clusters < FEW_CLUSTERS:
        warnings.append(f"only {n_clusters} clusters (short checkpoints) to resample: intervals are rough")
    return warnings


def _called(law: Law, term: Term) -> str:
    return " + ".join(law.symbols[axis] for axis in term.axes)
