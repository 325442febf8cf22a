"""The laws that can be fitted, as values."""

from dataclasses import dataclass

from fitting.errors import UnknownLawError


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A parametric form for log LongPPL, its parameters in the order every tuple of them uses.

    Attributes:
        name: the name under which fits store it.
        formula: the formula in words a reader can type into a notebook.
        parameter_names: one name per parameter.
        parameter_units: the unit of each, for absolute counts of parameters and tokens.
        lower: the smallest value allowed for each parameter.
        upper: the largest.
    """

    name: str
    formula: str
    parameter_names: tuple[str, ...]
    parameter_units: tuple[str, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    @property
    def n_parameters(self) -> int:
        """How many parameters the law has."""
        return len(self.parameter_names)


_UNBOUNDED = float("inf")

LONG_CONTEXT = Law(
    name="long_context",
    formula="log_longppl = A*N^-alpha + B_s*D_s^-beta_s + B_l*D_l^-beta_l + C",
    parameter_names=("A", "alpha", "B_s", "beta_s", "B_l", "beta_l", "C"),
    parameter_units=("nats*params^alpha", "1", "nats*tokens^beta_s", "1", "nats*tokens^beta_l", "1", "nats"),
    lower=(0.0, 0.01, 0.0, 0.01, 0.0, 0.01, -_UNBOUNDED),
    upper=(_UNBOUNDED, 2.0, _UNBOUNDED, 2.0, _UNBOUNDED, 2.0, _UNBOUNDED),
)

LAWS: dict[str, Law] = {law.name: law for law in (LONG_CONTEXT,)}


def law_named(name: str) -> Law:
    """The registered law of that name.

    Raises:
        UnknownLawError: no law has that name; the message lists those that exist.
    """
    try:
        return LAWS[name]
    except KeyError:
        raise UnknownLawError(name, sorted(LAWS)) from None
