"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter

from api.dependencies import DatabaseEngine
from api.models import Health, Readiness
from database.engine import redact
from database.migrate import check_at_head, head_revision

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> Health:
    """The process answers."""
    return Health(status="ok", version=version("longlaw"))


@router.get("/readyz")
def readyz(engine: DatabaseEngine) -> Readiness:
    """The database answers and has the tables that this code expects; a 503 says what is wrong."""
    check_at_head(engine)
    return Readiness(status="ready", database=redact(engine.url), revision=head_revision())
