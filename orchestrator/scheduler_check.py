"""`python -m orchestrator.scheduler_check`: exit code 0 where a leading scheduler was seen lately (a health check)."""

from __future__ import annotations

import sys

from sqlalchemy.orm import Session

from database.engine import create_engine
from database.errors import DatabaseError
from database.leading import leader_alive
from database.settings import Settings


def main() -> int:
    """Returns 0 with a leading scheduler, else 1 and a word about it on stderr."""
    settings = Settings()
    if settings.database_url is None:
        print("LONGLAW_DATABASE_URL is not set", file=sys.stderr)
        return 1
    try:
        engine = create_engine(settings.database_url.get_secret_value(), application_name="longlaw-check")
        with Session(engine) as session:
            alive = leader_alive(session)
    except DatabaseError as error:
        print(error, file=sys.stderr)
        return 1
    if not alive:
        print("no leading scheduler was seen lately", file=sys.stderr)
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
