"""What a fit minimises, for many sets of weights at once.

F(theta) = sum_i m_i huber_delta(r_i) + lambda/2 sum_j max(0, e_j - reference_j)^2. The residual r is the law minus the
measured loss, or the difference of their logarithms. It is a sum, not a mean: a mean shrinks under the stopping
tolerances as rows are added. The penalty is added to the loss of the rows; it is no residual, which the Huber loss
would flatten.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fitting.basis import Basis
from fitting.values import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """R objectives that share their rows.

    Attributes:
        basis: the rows' coordinates.
        y: measured losses (n).
        weights: m (R x n).
        huber_delta: where the loss turns linear.
        lower: lower bounds of theta (P, or R x P).
        upper: upper bounds.
        usable: which components of theta have an effect (P).
        log_residual: whether residuals are differences of logarithms.
        strength: lambda.
        references: of each component of theta, infinite where it is not penalised (P).
        offset: what is added to the law (R x 1); None for nothing.
    """

    basis: Basis
    y: FloatArray
    weights: FloatArray
    huber_delta: float
    lower: FloatArray
    upper: FloatArray
    usable: NDArray[np.bool_]
    log_residual: bool
    strength: float
    references: FloatArray
    offset: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.weights)

    def pick(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> "Objective":
        """The chosen ones of the R."""

        def part(array: FloatArray) -> FloatArray:
            return array[chosen] if array.ndim == 2 else array

        return replace(
            self,
            weights=self.weights[chosen],
            lower=part(self.lower),
            upper=part(self.upper),
            offset=None if self.offset is None else self.offset[chosen],
        )

    def rows(self, chosen: NDArray[np.intp]) -> "Objective":
        """The same over the chosen rows."""
        return replace(self, basis=self.basis.rows(chosen), y=self.y[chosen], weights=self.weights[:, chosen])

    @property
    def target(self) -> FloatArray:
        """What the law is to come to: y less the offset (n, or R x n)."""
        return self.y if self.offset is None else self.y - self.offset

    def residuals(self, values: FloatArray) -> FloatArray:
        """Residuals of the law's values (R x n); infinite where a logarithm does not exist."""
        if not self.log_residual:
            return values - self.target
        values = self.shifted(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            logs = np.where(values > 0, np.log(values), np.inf)
        return logs - np.log(self.y)

    def shifted(self, values: FloatArray) -> FloatArray:
        """The law's values with the offset."""
        return values if self.offset is None else values + self.offset

    def at(self, thetas: FloatArray) -> FloatArray:
        """F at one point each (R)."""
        return self.data_loss(self.residuals(self.basis.values(thetas))) + self.penalty(thetas)

    def data_loss(self, residuals: FloatArray) -> FloatArray:
        """The part of F that the rows make up (R)."""
        losses: FloatArray = np.einsum("rn,rn->r", self.weights, huber(residuals, self.huber_delta))
        return losses

    def excess(self, thetas: FloatArray) -> FloatArray:
        """max(0, e - reference) (R x P)."""
        return np.maximum(thetas - self.references, 0.0)

    def penalty(self, thetas: FloatArray) -> FloatArray:
        """The other part (R)."""
        penalties: FloatArray = 0.5 * self.strength * (self.excess(thetas) ** 2).sum(axis=-1)
        return penalties


def huber(residuals: FloatArray, delta: float) -> FloatArray:
    """r^2/2 up to delta, delta (|r| - delta/2) beyond, elementwise."""
    size = np.abs(residuals)
    inside = np.minimum(size, delta)
    losses: FloatArray = inside * (size - 0.5 * inside)
    return losses
