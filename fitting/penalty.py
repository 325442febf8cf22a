"""The one-sided penalty on the token exponents: its references, and how strong it may be.

A penalty held hard with references that are too low drives the offset below zero whatever it truly is. So its strength
is chosen by what it does to predictions: the largest training scale is left out, and the lambda that predicts it best
wins, the smaller one where they agree.
"""

import math
from typing import Literal

import numpy as np

from fitting import engine
from fitting.errors import FittingError, InvalidObservationsError
from fitting.holdout import evaluate
from fitting.laws import Law
from fitting.observations import Observations
from fitting.rows import Procedure, problem_of, rows_of
from fitting.slices import slice_references
from fitting.values import Penalty, Reference, Slicing

STRENGTHS = (0.0, 0.01, 0.1, 1.0, 100.0)


def penalty_of(
    law: Law,
    observations: Observations,
    procedure: Procedure,
    strength: float | Literal["auto"],
    references: tuple[Reference, ...] | Slicing,
) -> tuple[Penalty, list[str]]:
    """The penalty to fit under, and what is to be said about it.

    Raises:
        InvalidObservationsError: lambda is negative or not finite, or nothing in the law can be penalised.
    """
    if strength == 0:
        return Penalty(), []
    if strength != "auto" and not (math.isfinite(strength) and strength > 0):
        raise InvalidObservationsError(f"the penalty is {strength!r}; it must be 0 or more")
    if not law.penalised():
        if strength == "auto":
            return Penalty(chosen=True), [f"no penalty: the law {law.name} has no exponent of D_s or D_l alone"]
        raise InvalidObservationsError(f"the law {law.name} has no exponent of D_s or D_l alone to penalise")
    if not isinstance(references, Slicing):
        unknown = [item.parameter for item in references if item.parameter not in law.parameter_names]
        if unknown:
            raise InvalidObservationsError(f"the law {law.name} has no parameter {', '.join(unknown)}")
    said: list[str] = []
    if strength == "auto":
        strength, said = _chosen(law, observations, procedure, references)
        if strength == 0:
            return Penalty(chosen=True), said
        chosen = True
    else:
        chosen = False
    found = _references(law, observations, procedure, references)
    if not found:
        return Penalty(chosen=chosen), ["no penalty: no slices suggest an exponent"]
    return Penalty(strength=float(strength), references=found, chosen=chosen), said


def _references(
    law: Law, observations: Observations, procedure: Procedure, given: tuple[Reference, ...] | Slicing
) -> tuple[Reference, ...]:
    if not isinstance(given, Slicing):
        return given
    return slice_references(law, rows_of(law, observations, procedure.residual), procedure, given)


def _chosen(
    law: Law, observations: Observations, procedure: Procedure, given: tuple[Reference, ...] | Slicing
) -> tuple[float, list[str]]:
    """The lambda under which the other scales predict the largest one best."""
    largest = observations.n_params == observations.n_params.max()
    smaller, target = observations.subset(~largest), observations.subset(largest)
    try:
        rows = rows_of(law, smaller, procedure.residual)
    except FittingError as error:
        return 0.0, [f"no penalty: it cannot be chosen without the largest scale ({error})"]
    references = _references(law, smaller, procedure, given)
    if not references:
        return 0.0, ["no penalty: without the largest scale no slices suggest an exponent"]
    errors = []
    for strength in STRENGTHS:
        problem = problem_of(law, rows, procedure, Penalty(strength=strength, references=references))
        parameters = problem.basis.to_parameters(engine.search(problem).theta).tolist()
        errors.append(evaluate(parameters, target, law).mape_ppl or np.inf)
    best = STRENGTHS[int(np.argmin(errors))]
    path = ", ".join(f"{strength:g}: {error:.3g} %" for strength, error in zip(STRENGTHS, errors, strict=True))
    return best, [f"lambda {best:g} predicts the largest scale best from the others (LongPPL error by lambda: {path})"]
