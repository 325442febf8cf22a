"""The audit trail: an event is written in the transaction of the change that it tells of."""

from __future__ import annotations

import uuid

from sqlalchemy.orm import Session

from database.models import Event


def record_event(
    session: Session,
    kind: str,
    subject: str,
    /,
    *,
    grid_id: uuid.UUID | None = None,
    **payload: str | int | float | None,
) -> None:
    """Adds an event about `subject` (a key or an id) to the session's transaction."""
    session.add(Event(kind=kind, subject=subject, grid_id=grid_id, payload=payload))
