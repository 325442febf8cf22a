"""Errors of the results database.

::

    DatabaseError
    ├── DatabaseUrlError               the URL is unreadable or not Postgres
    ├── DatabaseUnavailableError       no server answers, or it refuses us
    ├── EmbeddedPostgresError          the embedded server cannot be prepared, started or stopped
    │   └── PortTakenError             the port asked for belongs to another program
    ├── SchemaError                    tables and code do not fit together
    │   ├── SchemaBehindError          the database lacks migrations: run `longlaw db upgrade`
    │   └── SchemaAheadError           the database was migrated by a newer Longlaw
    ├── ObservationConflictError       an import has other values for what is observed already
    └── VerbNotAllowedError            the state of a grid does not allow what is asked of it

No message holds a password.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DatabaseError(Exception):
    """Anything wrong with the results database that has a name."""


class DatabaseUrlError(DatabaseError):
    """The database URL cannot be read, or names something other than Postgres."""


class DatabaseUnavailableError(DatabaseError):
    """The server does not answer, or refuses the connection."""


class EmbeddedPostgresError(DatabaseError):
    """The embedded Postgres server cannot be prepared, started or stopped."""


class PortTakenError(EmbeddedPostgresError):
    """The port asked for is in use by another program."""


class SchemaError(DatabaseError):
    """The tables in the database and this version of the code do not fit together."""


class SchemaBehindError(SchemaError):
    """The database lacks migrations that this code needs."""


class SchemaAheadError(SchemaError):
    """The database was migrated by a newer version of Longlaw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two values for one observation.

    Attributes:
        row: the row of the import, from 0.
        with_row: the earlier row of the import that says otherwise; None where a stored observation does.
        observation_id: that observation; None where a row does.
        column: what they differ in.
        given: its value in `row`.
        other: its value there.
    """

    row: int
    with_row: int | None
    observation_id: int | None
    column: str
    given: object
    other: object


class ObservationConflictError(DatabaseError):
    """An import has other values for what is observed already; nothing of it is stored."""

    def __init__(self, conflicts: Sequence[Conflict]) -> None:
        super().__init__(f"{len(conflicts)} rows contradict what is observed already")
        self.conflicts = tuple(conflicts)


class VerbNotAllowedError(DatabaseError):
    """The state of a grid does not allow what is asked of it.

    Attributes:
        state: of the grid.
        verbs: what the state allows.
    """

    def __init__(self, message: str, *, state: str, verbs: tuple[str, ...]) -> None:
        super().__init__(message)
        self.state, self.verbs = state, verbs
