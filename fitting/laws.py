"""The laws that can be fitted: a closed set of values."""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from fitting.errors import UnknownLawError
from fitting.values import AXES, FloatArray

_INF = float("inf")
_EXPONENT_RANGE = (0.01, 2.0)
_RATE_RANGE = (1e-4, 1e4)


class Offset(StrEnum):
    """What a law approaches for ever larger sizes."""

    FREE = "free"
    NONNEGATIVE = "nonnegative"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One power-law term: positions of its parameters, and what it falls with.

    Attributes:
        amplitude: position of the amplitude.
        exponent: position of the exponent.
        axes: positions in (N, D_s, D_l) of what its size is the sum of.
        rate: position of the factor of the sum's second part; None where both count alike.
    """

    amplitude: int
    exponent: int
    axes: tuple[int, ...]
    rate: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A parametric form for a loss, its parameters in the order every tuple of them uses.

    A law of one stage keeps its tokens D where the others have D_l; sizes that no term uses take no part in it.

    Attributes:
        name: the name under which fits store it.
        formula: the formula in words a reader can type into a notebook.
        parameter_names: one name per parameter.
        parameter_units: the unit of each, for absolute counts of parameters and tokens.
        lower: the smallest value allowed for each parameter.
        upper: the largest.
        terms: its power-law terms.
        offset: whether it has a constant (the last parameter), and of which sign.
        interactions: positions of the amplitudes of products of two terms, each with the two terms it multiplies.
        symbols: what N, D_s and D_l are called in it.
    """

    name: str
    formula: str
    parameter_names: tuple[str, ...]
    parameter_units: tuple[str, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    terms: tuple[Term, ...]
    offset: Offset = Offset.FREE
    interactions: tuple[tuple[int, int, int], ...] = ()
    symbols: tuple[str, str, str] = ("N", "D_s", "D_l")

    @property
    def n_parameters(self) -> int:
        """How many parameters the law has."""
        return len(self.parameter_names)

    @property
    def axes(self) -> tuple[int, ...]:
        """Which of N, D_s, D_l it depends on."""
        return tuple(sorted({axis for term in self.terms for axis in term.axes}))

    def term_sizes(self, sizes: FloatArray) -> FloatArray:
        """What each term falls with (n x terms), from N, D_s, D_l (n x 3); a rate counts as one."""
        if all(len(term.axes) == 1 for term in self.terms):
            return sizes[:, [term.axes[0] for term in self.terms]]
        return np.column_stack([sizes[:, list(term.axes)].sum(axis=1) for term in self.terms])

    def without_offset(self) -> "Law":
        """The same law with its offset left out."""
        return replace(
            self,
            parameter_names=self.parameter_names[:-1],
            parameter_units=self.parameter_units[:-1],
            lower=self.lower[:-1],
            upper=self.upper[:-1],
            offset=Offset.NONE,
        )

    def penalised(self) -> dict[str, int]:
        """Positions of the exponents that slices give a reference for, by the axis of their slices."""
        return {AXES[term.axes[0]]: term.exponent for term in self.terms if term.axes in ((1,), (2,))}


def _terms(*axes: tuple[int, ...]) -> tuple[Term, ...]:
    return tuple(Term(amplitude=2 * k, exponent=2 * k + 1, axes=inputs) for k, inputs in enumerate(axes))


_THREE = ("A", "alpha", "B_s", "beta_s", "B_l", "beta_l")
_THREE_UNITS = ("nats*params^alpha", "1", "nats*tokens^beta_s", "1", "nats*tokens^beta_l", "1")
_LOW, _HIGH = (0.0, _EXPONENT_RANGE[0]), (_INF, _EXPONENT_RANGE[1])
_SUM = "A*N^-alpha + B_s*D_s^-beta_s + B_l*D_l^-beta_l"

LONG_CONTEXT = Law(
    name="long_context",
    formula=f"log_longppl = {_SUM} + C",
    parameter_names=(*_THREE, "C"),
    parameter_units=(*_THREE_UNITS, "nats"),
    lower=(*_LOW * 3, -_INF),
    upper=(*_HIGH * 3, _INF),
    terms=_terms((0,), (1,), (2,)),
)

NO_OFFSET = Law(
    name="no_offset",
    formula=f"log_longppl = {_SUM}",
    parameter_names=_THREE,
    parameter_units=_THREE_UNITS,
    lower=_LOW * 3,
    upper=_HIGH * 3,
    terms=_terms((0,), (1,), (2,)),
    offset=Offset.NONE,
)

NONNEGATIVE_OFFSET = Law(
    name="nonnegative_offset",
    formula=f"log_longppl = {_SUM} + C, C >= 0",
    parameter_names=(*_THREE, "C"),
    parameter_units=(*_THREE_UNITS, "nats"),
    lower=(*_LOW * 3, 0.0),
    upper=(*_HIGH * 3, _INF),
    terms=_terms((0,), (1,), (2,)),
    offset=Offset.NONNEGATIVE,
)

COMBINED_BUDGET = Law(
    name="combined_budget",
    formula="log_longppl = A*N^-alpha + B*(D_s + D_l)^-beta + C",
    parameter_names=("A", "alpha", "B", "beta", "C"),
    parameter_units=("nats*params^alpha", "1", "nats*tokens^beta", "1", "nats"),
    lower=(*_LOW * 2, -_INF),
    upper=(*_HIGH * 2, _INF),
    terms=_terms((0,), (1, 2)),
)

EFFECTIVE_DATA = Law(
    name="effective_data",
    formula="log_longppl = A*N^-alpha + B*(D_s + k*D_l)^-beta + C",
    parameter_names=("A", "alpha", "B", "beta", "k", "C"),
    parameter_units=("nats*params^alpha", "1", "nats*tokens^beta", "1", "1", "nats"),
    lower=(*_LOW * 2, _RATE_RANGE[0], -_INF),
    upper=(*_HIGH * 2, _RATE_RANGE[1], _INF),
    terms=(
        Term(amplitude=0, exponent=1, axes=(0,)),
        Term(amplitude=2, exponent=3, axes=(1, 2), rate=4),
    ),
)

INTERACTIONS = Law(
    name="interactions",
    formula=(
        f"log_longppl = {_SUM} + I_ns*N^-alpha*D_s^-beta_s + I_nl*N^-alpha*D_l^-beta_l "
        "+ I_sl*D_s^-beta_s*D_l^-beta_l + C"
    ),
    parameter_names=(*_THREE, "I_ns", "I_nl", "I_sl", "C"),
    parameter_units=(
        *_THREE_UNITS,
        "nats*params^alpha*tokens^beta_s",
        "nats*params^alpha*tokens^beta_l",
        "nats*tokens^(beta_s+beta_l)",
        "nats",
    ),
    # a negative amplitude is possible beside interactions: what has a sign is a size's effect at the centre of the rows
    lower=(*(-_INF, _EXPONENT_RANGE[0]) * 3, -_INF, -_INF, -_INF, -_INF),
    upper=(*_HIGH * 3, _INF, _INF, _INF, _INF),
    terms=_terms((0,), (1,), (2,)),
    interactions=((6, 0, 1), (7, 0, 2), (8, 1, 2)),
)

TRAJECTORY = Law(
    name="trajectory",
    formula="log_longppl = B_l*D_l^-beta_l + C_prime, for one N and one D_s",
    parameter_names=("B_l", "beta_l", "C_prime"),
    parameter_units=("nats*tokens^beta_l", "1", "nats"),
    lower=(*_LOW, -_INF),
    upper=(*_HIGH, _INF),
    terms=_terms((2,)),
)

CHINCHILLA = Law(
    name="chinchilla",
    formula="loss = A*N^-alpha + B*D^-beta + E",
    parameter_names=("A", "alpha", "B", "beta", "E"),
    parameter_units=("nats*params^alpha", "1", "nats*tokens^beta", "1", "nats"),
    lower=(*_LOW * 2, -_INF),
    upper=(*_HIGH * 2, _INF),
    terms=_terms((0,), (2,)),
    symbols=("N", "D_s", "D"),
)

VARIANTS = (LONG_CONTEXT, NO_OFFSET, NONNEGATIVE_OFFSET, COMBINED_BUDGET, EFFECTIVE_DATA, INTERACTIONS)
LAWS: dict[str, Law] = {law.name: law for law in (*VARIANTS, TRAJECTORY, CHINCHILLA)}


def law_named(name: str) -> Law:
    """The registered law of that name.

    Raises:
        UnknownLawError: no law has that name; the message lists those that exist.
    """
    try:
        return LAWS[name]
    except KeyError:
        raise UnknownLawError(name, list(LAWS)) from None
