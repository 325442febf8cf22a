"""What the fitting library refuses, and why.

FittingError
├── UnknownLawError              no law of that name
├── InvalidObservationsError     columns or rows that cannot be fitted, each named
├── NotEnoughObservationsError   fewer distinct points than the law has parameters
├── InvalidSelectionError        a COL=VALUE selection that names no column or selects nothing
└── InvalidPointError            a size at which no law can be evaluated

A fit that is merely poor is none of these: it comes back as a ``Fit`` whose status says so.
"""

from collections.abc import Sequence

from fitting.values import RejectedRow

_ROWS_SHOWN = 20


class FittingError(Exception):
    """Anything the fitting library refuses to do."""


class UnknownLawError(FittingError):
    """A law was asked for by a name that is not registered."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"there is no law named {name!r}; known laws: {', '.join(known)}")


class InvalidObservationsError(FittingError):
    """The table as a whole, or some of its rows, cannot be read as observations."""

    def __init__(self, message: str, rows: Sequence[RejectedRow] = ()) -> None:
        self.rows = tuple(rows)
        shown = [f"row {bad.row}: {bad.reason}" for bad in self.rows[:_ROWS_SHOWN]]
        if len(self.rows) > _ROWS_SHOWN:
            shown.append(f"and {len(self.rows) - _ROWS_SHOWN} more rows")
        super().__init__("\n  ".join([message, *shown]))


class NotEnoughObservationsError(FittingError):
    """Fewer distinct (N, D_s, D_l) points than parameters: no fit is attempted."""

    def __init__(self, needed: int, have: int) -> None:
        self.needed = needed
        self.have = have
        super().__init__(f"need at least {needed} distinct observations, have {have}")


class InvalidSelectionError(FittingError):
    """A selection of rows written as COL=VALUE does not fit the table."""


class InvalidPointError(FittingError):
    """A prediction was asked for at a size that is not a positive finite number."""
