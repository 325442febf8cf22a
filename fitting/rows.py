"""From observations to the problem that is solved: rows in an order of their own, and how they are to be fitted."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitting import identifiability
from fitting.basis import Basis
from fitting.engine import Problem
from fitting.errors import InvalidObservationsError, NotEnoughObservationsError
from fitting.laws import TRAJECTORY, Law
from fitting.observations import Observations, distinct_rows
from fitting.values import FloatArray, Loss, Penalty, RejectedRow, Resampled, Residual


@dataclass(frozen=True, kw_only=True, slots=True)
class Procedure:
    """How a law is fitted; :func:`fitting.joint.fit` describes each setting."""

    huber_delta: float = 0.05
    loss: Loss = Loss.HUBER
    residual: Residual = Residual.LINEAR
    bootstrap_draws: int = 200
    seed: int = 0
    level: float = 0.9
    resampled: Resampled = Resampled.CLUSTERS
    searched: bool = False

    def __post_init__(self) -> None:
        if not (self.huber_delta > 0 and math.isfinite(self.huber_delta)):
            raise InvalidObservationsError(f"huber_delta is {self.huber_delta!r}; it must be positive and finite")
        if self.bootstrap_draws < 0:
            raise InvalidObservationsError(f"bootstrap_draws is {self.bootstrap_draws!r}; it must be 0 or more")
        if not 0 < self.level < 1:
            raise InvalidObservationsError(f"level is {self.level!r}; it must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Observations as arrays in an order that depends on their content alone; ``weights`` have a mean of one."""

    sizes: FloatArray
    y: FloatArray
    cluster: NDArray[np.int64]
    weights: FloatArray


def rows_of(law: Law, observations: Observations, residual: Residual) -> Rows:
    """The observations in order, checked against what the law and the residual need.

    Raises:
        NotEnoughObservationsError: fewer distinct points than parameters.
        InvalidObservationsError: a loss without a logarithm, or several trajectories under the law of one.
    """
    have = n_distinct(law, observations) if len(observations) else 0
    if have < law.n_parameters:
        raise NotEnoughObservationsError(law.n_parameters, have)
    if residual is Residual.LOG and (observations.log_longppl <= 0).any():
        without = np.flatnonzero(observations.log_longppl <= 0)
        raise InvalidObservationsError(
            f"{len(without)} rows have a loss without a logarithm; use linear residuals or leave them out",
            [
                RejectedRow(row=observations.row_ids[i], reason=f"loss is {observations.log_longppl[i]:g}")
                for i in without.tolist()
            ],
        )
    if law is TRAJECTORY:
        starts = len(np.unique(observations.sizes[:, :2], axis=0))
        if starts > 1:
            raise InvalidObservationsError(
                f"the law {law.name} is for one N and one D_s, and these rows have {starts} pairs; choose one of them"
            )
    sizes = observations.sizes
    order = np.lexsort((observations.cluster, observations.log_longppl, *sizes.T[::-1]))
    weights = np.ones(len(order))
    if observations.standard_error is not None:
        weights = observations.standard_error[order] ** -2.0
        weights /= weights.mean()
    return Rows(
        sizes=sizes[order],
        y=observations.log_longppl[order],
        cluster=_in_order(observations.cluster[order]),
        weights=weights,
    )


def _in_order(cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    """Clusters numbered by their first rows: what a bootstrap draws must not depend on what they are called."""
    _, first, code = np.unique(cluster, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[code.ravel()].astype(np.int64)


def n_distinct(law: Law, observations: Observations) -> int:
    """How many points differ as the law sees them."""
    sizes = observations.sizes
    rated = any(term.rate is not None for term in law.terms)
    return int(distinct_rows(sizes[:, list(law.axes)] if rated else law.term_sizes(sizes))[1].max()) + 1


def problem_of(law: Law, rows: Rows, procedure: Procedure, penalty: Penalty | None = None) -> Problem:
    """The problem of those rows."""
    varied = identifiability.varied_axes(law.term_sizes(rows.sizes))
    basis = Basis.of(rows.sizes, varied, law)
    lower, upper = basis.bounds
    references = np.full(law.n_parameters, np.inf)
    for reference in penalty.references if penalty is not None else ():
        references[law.parameter_names.index(reference.parameter)] = reference.value
    return Problem(
        basis=basis,
        log_longppl=rows.y,
        weights=rows.weights,
        huber_delta=procedure.huber_delta if procedure.loss is Loss.HUBER else 0.0,
        lower=lower,
        upper=upper,
        varied=varied,
        log_residual=procedure.residual is Residual.LOG,
        strength=penalty.strength if penalty is not None else 0.0,
        references=references,
    )
