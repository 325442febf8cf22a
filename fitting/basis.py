"""Centred coordinates in which a law is well conditioned.

With m_j the mean of log x_j over the fitted rows and L_j = log x_j - m_j, a law with a free offset has its terms in the
Box-Cox form b_j u_j with u_j = (exp(-e_j L_j) - 1)/e_j, which stays distinct from the constant however small the
exponent is, and the constant c is the law's value at the centre. Then A_j = (b_j/e_j) exp(e_j m_j) and
C = c - sum b_j/e_j. A law whose offset has a sign, or none, has b_j exp(-e_j L_j) instead, with A_j = b_j exp(e_j m_j).
A product of two terms is b_ij u_i u_j.

A point theta has one entry per parameter of the law, in its order. Given the exponents (and a rate, held as its
logarithm) the law is linear in the rest. All functions take any number of points at once, over leading axes.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fitting.laws import LONG_CONTEXT, Law, Offset
from fitting.values import FloatArray

_COMPLEX_STEP = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """The rows of a fit in centred coordinates.

    Attributes:
        centre: m, one per term.
        logs: L (n x terms), zero for a term whose size does not vary.
        law: the law.
        stages: logarithms of the two parts of the term that has a rate (n x 2); None without one.
        linear: positions of what the law is linear in: amplitudes, then products, then the constant.
        nonlinear: positions of the exponents, then of the rate if there is one.
        across: L with the rows last, as all columns have them (terms x n).
    """

    centre: FloatArray
    logs: FloatArray
    law: Law = LONG_CONTEXT
    stages: FloatArray | None = None
    linear: list[int] = field(init=False)
    nonlinear: list[int] = field(init=False)
    across: FloatArray = field(init=False)

    @classmethod
    def of(cls, sizes: FloatArray, varied: NDArray[np.bool_], law: Law = LONG_CONTEXT) -> "Basis":
        """The coordinates centred on these rows of N, D_s, D_l (n x 3, positive).

        A term whose size is not ``varied`` counts as one value: it is part of the constant.
        """
        logs = np.log(law.term_sizes(sizes))
        centre = logs.mean(axis=0)
        rated = next((term for term in law.terms if term.rate is not None), None)
        return cls(
            centre=centre,
            logs=np.where(varied, logs - centre, 0.0),
            law=law,
            stages=np.log(sizes[:, list(rated.axes)]) if rated is not None else None,
        )

    def rows(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> "Basis":
        """The same coordinates over the chosen rows."""
        stages = None if self.stages is None else self.stages[chosen]
        return Basis(centre=self.centre, logs=self.logs[chosen], law=self.law, stages=stages)

    def __post_init__(self) -> None:
        law = self.law
        amplitudes = [term.amplitude for term in law.terms]
        products = [position for position, _, _ in law.interactions]
        constant = [law.n_parameters - 1] if law.offset is not Offset.NONE else []
        rates = [term.rate for term in law.terms if term.rate is not None]
        object.__setattr__(self, "linear", amplitudes + products + constant)
        object.__setattr__(self, "nonlinear", [term.exponent for term in law.terms] + rates)
        object.__setattr__(self, "across", np.ascontiguousarray(self.logs.T))

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Bounds of theta."""
        lower, upper = np.array(self.law.lower), np.array(self.law.upper)
        for term in self.law.terms:
            lower[term.amplitude] = 0.0
            if term.rate is not None:
                lower[term.rate], upper[term.rate] = np.log(lower[term.rate]), np.log(upper[term.rate])
        return lower, upper

    def _logs(self, nonlinear: FloatArray) -> FloatArray:
        if self.stages is None:
            return self.across
        logs = np.empty((*nonlinear.shape[:-1], len(self.law.terms), len(self.logs)))
        logs[:] = self.across
        if self.logs[:, -1].any():
            logs[..., -1, :] = self._rated(nonlinear) - self.centre[-1]
        return logs

    def _rated(self, nonlinear: FloatArray) -> FloatArray:
        assert self.stages is not None
        rated: FloatArray = np.logaddexp(self.stages[:, 0], nonlinear[..., -1:] + self.stages[:, 1])
        return rated

    def design(self, nonlinear: FloatArray) -> FloatArray:
        """Columns that the law is a linear combination of (... x k x n), at exponents and rate (... x p)."""
        terms, pairs = len(self.law.terms), self.law.interactions
        powers = -nonlinear[..., :terms, None] * self._logs(nonlinear)
        columns = np.empty((*powers.shape[:-2], len(self.linear), powers.shape[-1]))
        shapes = columns[..., :terms, :]
        if self.law.offset is Offset.FREE:
            np.divide(np.expm1(powers, out=powers), nonlinear[..., :terms, None], out=shapes)
        else:
            np.exp(powers, out=shapes)
        for k, (_, i, j) in enumerate(pairs, start=terms):
            columns[..., k, :] = shapes[..., i, :] * shapes[..., j, :]
        if self.law.offset is not Offset.NONE:
            columns[..., -1, :] = 1.0
        return columns

    def slopes(self, nonlinear: FloatArray, linear: FloatArray, columns: FloatArray) -> FloatArray:
        """Derivatives of the law in exponents and rate (... x p x n).

        Args:
            nonlinear: where (... x p).
            linear: coefficients of the columns (... x k).
            columns: the design there.
        """
        terms = len(self.law.terms)
        shapes = columns[..., :terms, :]
        powers, first = self._bends(nonlinear, shapes)
        gain = self._gain(linear, shapes)
        slopes: FloatArray = gain * first
        if self.stages is None:
            return slopes
        along_rate = -(gain[..., -1, :] * powers[..., -1, :] * self._share(nonlinear))
        return np.concatenate([slopes, along_rate[..., None, :]], axis=-2)

    def curvature(self, theta: FloatArray, pull: FloatArray) -> FloatArray:
        """Second derivatives of the law in theta (... x parameters x parameters), summed over rows with weights.

        Args:
            theta: where (... x parameters).
            pull: the weight of each row (... x n).
        """
        terms = len(self.law.terms)
        nonlinear, linear = theta[..., self.nonlinear], theta[..., self.linear]
        shapes = self.design(nonlinear)[..., :terms, :]
        logs, exponents = self._logs(nonlinear), nonlinear[..., :terms, None]
        powers, first = self._bends(nonlinear, shapes)
        gain = self._gain(linear, shapes)
        free = self.law.offset is Offset.FREE
        second = (logs**2 * powers - 2 * first) / exponents if free else -logs * first

        def total(rows: FloatArray) -> FloatArray:
            sums: FloatArray = (rows @ pull[..., None])[..., 0]
            return sums

        curvature = np.zeros((*theta.shape, theta.shape[-1]))
        amplitudes, bends = self.linear[:terms], self.nonlinear[:terms]
        curvature[..., amplitudes, bends] = curvature[..., bends, amplitudes] = total(first)
        curvature[..., bends, bends] = total(gain * second)

        def put(one: int, other: int, row: FloatArray) -> None:
            curvature[..., one, other] = curvature[..., other, one] = total(row[..., None, :])[..., 0]

        for k, (position, i, j) in enumerate(self.law.interactions, start=terms):
            put(position, bends[i], first[..., i, :] * shapes[..., j, :])
            put(position, bends[j], shapes[..., i, :] * first[..., j, :])
            put(bends[i], bends[j], linear[..., k, None] * first[..., i, :] * first[..., j, :])
        if self.stages is not None:
            share, rate = self._share(nonlinear), self.nonlinear[-1]
            power, exponent = powers[..., -1, :] * share, exponents[..., -1, :]
            mixed = logs[..., -1, :] * power - (0.0 if free else shapes[..., -1, :] * share)
            put(amplitudes[-1], rate, -power)
            put(bends[-1], rate, gain[..., -1, :] * mixed)
            put(rate, rate, gain[..., -1, :] * power * (exponent * share - (1 - share)))
        return curvature

    def _bends(self, nonlinear: FloatArray, shapes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Minus the terms' derivatives in L, and their derivatives in their exponents, for unit amplitudes."""
        logs, exponents = self._logs(nonlinear), nonlinear[..., : len(self.law.terms), None]
        powers = exponents * shapes
        if self.law.offset is not Offset.FREE:
            return powers, -logs * shapes
        powers += 1.0
        first = logs * powers
        first += shapes
        first /= -exponents
        return powers, first

    def _gain(self, linear: FloatArray, shapes: FloatArray) -> FloatArray:
        """What each term's shape is multiplied by: its amplitude and its part of the products."""
        terms = len(self.law.terms)
        gain = linear[..., :terms, None]
        if self.law.interactions:
            gain = np.broadcast_to(gain, shapes.shape).copy()
            for k, (_, i, j) in enumerate(self.law.interactions, start=terms):
                gain[..., i, :] += linear[..., k, None] * shapes[..., j, :]
                gain[..., j, :] += linear[..., k, None] * shapes[..., i, :]
        return gain

    def _share(self, nonlinear: FloatArray) -> FloatArray:
        """The derivative of the rated term's L in the logarithm of its rate (... x n); zero where L does not vary."""
        assert self.stages is not None
        share: FloatArray = np.exp(nonlinear[..., -1:] + self.stages[:, 1] - self._rated(nonlinear))
        return share * self.logs[:, -1].any()

    def columns(self, nonlinear: FloatArray) -> FloatArray:
        """The design with one row of the result per row of the table (... x n x k)."""
        return np.swapaxes(self.design(nonlinear), -1, -2)

    def values(self, theta: FloatArray) -> FloatArray:
        """The law on every row (... x n)."""
        values: FloatArray = (theta[..., None, self.linear] @ self.design(theta[..., self.nonlinear]))[..., 0, :]
        return values

    def jacobian(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the law with respect to theta (... x n x parameters)."""
        return np.swapaxes(self.gradients(theta), -1, -2)

    def gradients(self, theta: FloatArray) -> FloatArray:
        """The same with the rows last (... x parameters x n)."""
        nonlinear, linear = theta[..., self.nonlinear], theta[..., self.linear]
        columns = self.design(nonlinear)
        gradients = np.empty((*theta.shape, len(self.logs)))
        gradients[..., self.linear, :] = columns
        gradients[..., self.nonlinear, :] = self.slopes(nonlinear, linear, columns)
        return gradients

    def to_parameters(self, thetas: FloatArray) -> FloatArray:
        """Parameters for absolute counts (of the same shape) of points theta."""
        parameters: FloatArray = self._absolute(np.array(thetas))
        return parameters

    def _absolute(self, parameters: FloatArray) -> FloatArray:
        law = self.law
        thetas = parameters.copy()
        exponents = [thetas[..., term.exponent] for term in law.terms]
        lifts = [np.exp(e * m) for e, m in zip(exponents, self.centre, strict=True)]
        for term in law.terms:
            if term.rate is not None:
                parameters[..., term.rate] = np.exp(thetas[..., term.rate])
        if law.offset is not Offset.FREE:
            for term, lift in zip(law.terms, lifts, strict=True):
                parameters[..., term.amplitude] = thetas[..., term.amplitude] * lift
            return parameters
        scaled = [thetas[..., term.amplitude] / e for term, e in zip(law.terms, exponents, strict=True)]
        constant = thetas[..., -1] - sum(scaled)
        for position, i, j in law.interactions:
            product = thetas[..., position] / (exponents[i] * exponents[j])
            parameters[..., position] = product * lifts[i] * lifts[j]
            scaled[i] = scaled[i] - product
            scaled[j] = scaled[j] - product
            constant = constant + product
        for term, amplitude, lift in zip(law.terms, scaled, lifts, strict=True):
            parameters[..., term.amplitude] = amplitude * lift
        parameters[..., -1] = constant
        return parameters

    def parameter_gradients(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the parameters for absolute counts with respect to theta, one parameter per row.

        By complex steps, which are exact to rounding (Squire and Trapp 1998).
        """
        steps = theta + 1j * _COMPLEX_STEP * np.eye(len(theta))
        gradients: FloatArray = self._absolute(steps).imag.T / _COMPLEX_STEP
        return gradients
