"""Centred coordinates in which the seven-parameter law is well conditioned.

With m_j the mean of log x_j over the fitted rows and L_j = log x_j - m_j, each term is written in the Box-Cox form
b_j (exp(-e_j L_j) - 1)/e_j, which stays distinct from the constant however small the exponent is, and the constant c
is the law's value at the centre. Then A_j = (b_j/e_j) exp(e_j m_j) and C = c - sum b_j/e_j.
A point is theta = (b_N, e_N, b_s, e_s, b_l, e_l, c).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitting.values import FloatArray

AMPLITUDES = np.array([0, 2, 4])
EXPONENTS = np.array([1, 3, 5])
CONSTANT = 6
N_PARAMETERS = 7


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """The rows of a fit in centred coordinates: ``centre`` is m (3), ``logs`` is L (n x 3)."""

    centre: FloatArray
    logs: FloatArray

    @classmethod
    def of(cls, sizes: FloatArray, varied: NDArray[np.bool_]) -> "Basis":
        """The coordinates centred on these rows of N, D_s, D_l (n x 3, positive).

        An axis that is not ``varied`` (3) counts as one value: its term is part of the constant.
        """
        logs = np.log(sizes)
        centre = logs.mean(axis=0)
        return cls(centre=centre, logs=np.where(varied, logs - centre, 0.0))

    def rows(self, chosen: NDArray[np.bool_]) -> "Basis":
        """The same coordinates over the chosen rows."""
        return Basis(centre=self.centre, logs=self.logs[chosen])

    def columns(self, exponents: FloatArray) -> FloatArray:
        """The three basis functions at those exponents (n x 3)."""
        columns: FloatArray = np.expm1(-self.logs * exponents) / exponents
        return columns

    def values(self, theta: FloatArray) -> FloatArray:
        """The law on every row (n)."""
        values: FloatArray = self.columns(theta[EXPONENTS]) @ theta[AMPLITUDES] + theta[CONSTANT]
        return values

    def jacobian(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the law with respect to theta (n x 7)."""
        exponents = theta[EXPONENTS]
        columns = self.columns(exponents)
        jacobian = np.empty((len(self.logs), N_PARAMETERS))
        jacobian[:, AMPLITUDES] = columns
        # d/de of (exp(-eL) - 1)/e, with exp(-eL) = e*column + 1
        slope = -(self.logs * (exponents * columns + 1.0) + columns) / exponents
        jacobian[:, EXPONENTS] = theta[AMPLITUDES] * slope
        jacobian[:, CONSTANT] = 1.0
        return jacobian

    def to_parameters(self, thetas: FloatArray) -> FloatArray:
        """Parameters for absolute counts (... x 7) of points theta (... x 7)."""
        parameters = np.array(thetas, dtype=np.float64)
        exponents, amplitudes = thetas[..., EXPONENTS], thetas[..., AMPLITUDES]
        parameters[..., AMPLITUDES] = amplitudes / exponents * np.exp(exponents * self.centre)
        parameters[..., CONSTANT] = thetas[..., CONSTANT] - (amplitudes / exponents).sum(axis=-1)
        return parameters

    def parameter_gradients(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the parameters for absolute counts with respect to theta (7 x 7, one parameter per row)."""
        exponents, amplitudes = theta[EXPONENTS], theta[AMPLITUDES]
        gradients = np.eye(N_PARAMETERS)
        lifted = np.exp(exponents * self.centre) / exponents
        gradients[AMPLITUDES, AMPLITUDES] = lifted
        gradients[AMPLITUDES, EXPONENTS] = amplitudes * lifted * (self.centre - 1.0 / exponents)
        gradients[CONSTANT, AMPLITUDES] = -1.0 / exponents
        gradients[CONSTANT, EXPONENTS] = amplitudes / exponents**2
        return gradients
