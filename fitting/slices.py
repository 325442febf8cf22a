"""Exponents as slices of the observations suggest them: one axis varied, the other two as they are.

Each slice has an offset of its own. Without one, the other terms count as part of the power law and its exponent comes
out far too low (0.06 for 0.30 on the paper's grid), precisely and wrongly. With one, five noisy points hardly tell the
exponent from the offset: a median at the end of the exponents' range says nothing and is no reference.
"""

import numpy as np
from numpy.typing import NDArray

from fitting import engine
from fitting.basis import Basis
from fitting.engine import Problem
from fitting.laws import TRAJECTORY, Law
from fitting.rows import Procedure, Rows
from fitting.values import AXES, FloatArray, Loss, Reference, Slicing

# An exponent, an amplitude and an offset: fewer points determine nothing, as many leave no residual.
_FEWEST = 4
_FEWEST_PLAIN = 3


def slice_references(
    law: Law, rows: Rows, procedure: Procedure, slicing: Slicing = Slicing.OFFSET
) -> tuple[Reference, ...]:
    """What the slices of each token axis suggest, for the exponents that a penalty acts on.

    An axis without a slice long enough has none, and neither has one whose median lies at a bound.

    Args:
        law: the law whose exponents are meant.
        rows: the rows to slice.
        procedure: the loss of the slices' fits and its delta; residuals are linear.
        slicing: how slices become one exponent.
    """
    references = []
    for axis, position in law.penalised().items():
        weights = _slices(rows, AXES.index(axis), _FEWEST_PLAIN if slicing is Slicing.PLAIN else _FEWEST)
        if not len(weights):
            continue
        if slicing is Slicing.PLAIN:
            value = float(np.median(_slopes(rows, AXES.index(axis), weights > 0)))
        else:
            value = float(np.median(_exponents(_problem(rows, AXES.index(axis), procedure), weights)))
        if law.lower[position] < value < law.upper[position]:
            name = law.parameter_names[position]
            references.append(Reference(parameter=name, value=value, n_slices=len(weights)))
    return tuple(references)


def _slices(rows: Rows, axis: int, fewest: int) -> FloatArray:
    """Weights that pick one slice each (S x n), for slices with enough different sizes on their axis."""
    others = [k for k in range(3) if k != axis]
    _, code = np.unique(rows.sizes[:, others], axis=0, return_inverse=True)
    code = code.ravel()
    kept = [s for s in range(int(code.max()) + 1) if len(np.unique(rows.sizes[code == s, axis])) >= fewest]
    return np.array([rows.weights * (code == s) for s in kept])


def _problem(rows: Rows, axis: int, procedure: Procedure) -> Problem:
    varied = np.array([True])
    sizes = np.ones_like(rows.sizes)
    sizes[:, 2] = rows.sizes[:, axis]
    basis = Basis.of(sizes, varied, TRAJECTORY)
    lower, upper = basis.bounds
    return Problem(
        basis=basis,
        log_longppl=rows.y,
        weights=rows.weights,
        huber_delta=procedure.huber_delta if procedure.loss is Loss.HUBER else 0.0,
        lower=lower,
        upper=upper,
        varied=varied,
    )


def _exponents(problem: Problem, weights: FloatArray) -> FloatArray:
    exponents: FloatArray = engine.refit(problem, weights, np.array([1.0, 0.3, 0.0]), searched=True).thetas[:, 1]
    return exponents


def _slopes(rows: Rows, axis: int, slices: NDArray[np.bool_]) -> FloatArray:
    logs = np.log(rows.sizes[:, axis])
    return -np.array([np.polyfit(logs[chosen], np.log(rows.y[chosen]), 1)[0] for chosen in slices])
