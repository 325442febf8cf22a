"""Exponents as slices of the observations suggest them: one axis varied, the other two as they are.

Each slice is fitted with an offset of its own. Without one, the other terms count as part of the power law and its
exponent comes out far too low (0.06 for 0.30 on the paper's grid), precisely and wrongly.
"""

import numpy as np

from fitting import engine
from fitting.basis import Basis
from fitting.engine import Problem
from fitting.laws import TRAJECTORY, Law
from fitting.rows import Procedure, Rows
from fitting.values import AXES, FloatArray, Loss, Reference

# An exponent, an amplitude and an offset: fewer points determine nothing, as many leave no residual.
_FEWEST = 4
_FEWEST_PLAIN = 3


def slice_exponents(rows: Rows, axis: int, procedure: Procedure, *, offset: bool = True) -> FloatArray:
    """The exponent of every slice along an axis (0, 1 or 2 for N, D_s, D_l) that has enough different sizes.

    Args:
        rows: the rows to slice.
        axis: the axis that varies in a slice; the other two have one value.
        procedure: delta and the loss of the slices' fits; residuals are linear.
        offset: whether a slice has an offset; without, it is a straight line between logarithms.
    """
    others = [k for k in range(3) if k != axis]
    _, code = np.unique(rows.sizes[:, others], axis=0, return_inverse=True)
    code = code.ravel()
    fewest = _FEWEST if offset else _FEWEST_PLAIN
    kept = [s for s in range(int(code.max()) + 1) if len(np.unique(rows.sizes[code == s, axis])) >= fewest]
    if not kept:
        return np.empty(0)
    if not offset:
        lines = [np.polyfit(np.log(rows.sizes[code == s, axis]), np.log(rows.y[code == s]), 1)[0] for s in kept]
        return -np.array(lines)
    varied = np.array([True])
    sizes = np.ones_like(rows.sizes)
    sizes[:, 2] = rows.sizes[:, axis]
    basis = Basis.of(sizes, varied, TRAJECTORY)
    lower, upper = basis.bounds
    problem = Problem(
        basis=basis,
        log_longppl=rows.y,
        weights=rows.weights,
        huber_delta=procedure.huber_delta if procedure.loss is Loss.HUBER else 0.0,
        lower=lower,
        upper=upper,
        varied=varied,
    )
    weights = np.stack([rows.weights * (code == s) for s in kept])
    start = np.array([1.0, 0.3, 0.0])
    refits = engine.refit(problem, weights, start, searched=True)
    exponents: FloatArray = refits.thetas[refits.converged & (refits.thetas[:, 0] > 0), 1]
    return exponents


def slice_references(law: Law, rows: Rows, procedure: Procedure, *, offset: bool = True) -> tuple[Reference, ...]:
    """The median exponent of the slices of each token axis, for the exponents that a penalty acts on.

    An axis without a slice long enough has none.
    """
    references = []
    for axis, position in law.penalised().items():
        exponents = slice_exponents(rows, AXES.index(axis), procedure, offset=offset)
        if len(exponents):
            references.append(
                Reference(
                    parameter=law.parameter_names[position],
                    value=float(np.median(exponents)),
                    n_slices=len(exponents),
                )
            )
    return tuple(references)
