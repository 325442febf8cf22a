"""Errors of the results database.

::

    DatabaseError
    ├── DatabaseUrlError               the URL is unreadable or not Postgres
    ├── DatabaseUnavailableError       no server answers, or it refuses us
    ├── EmbeddedPostgresError          the embedded server cannot be prepared, started or stopped
    │   └── PortTakenError             the port asked for belongs to another program
    └── SchemaError                    tables and code do not fit together
        ├── SchemaBehindError          the database lacks migrations: run `longlaw db upgrade`
        └── SchemaAheadError           the database was migrated by a newer Longlaw

No message holds a password.
"""


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
