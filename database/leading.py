"""Which scheduler leads, and whether one is alive. One holds an advisory lock; the others stand by."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from database.models import Attempt, Scheduler

#: The advisory lock's number, ours within one database: the letters "longlaw" as an integer.
_LOCK = int.from_bytes(b"longlaw", "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerProcess:
    """A scheduler as the database knows it; `started_at_s` is the database's clock, seconds since 1970."""

    id: uuid.UUID
    host: str
    pid: int
    started_at_s: float


def lead(connection: Connection) -> bool:
    """Whether the connection's session holds the leader's lock now; taking it never waits.

    The lock lives as long as the session: a leader that dies, or loses its connection, leads no more.
    """
    held = connection.scalar(
        text(
            "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted"
            " AND ((classid::bigint << 32) | objid::bigint) = :lock) OR pg_try_advisory_lock(:lock)"
        ),
        {"lock": _LOCK},
    )
    connection.commit()
    return bool(held)


def heartbeat(session: Session, *, scheduler_id: uuid.UUID, host: str, pid: int, workers: int, leading: bool) -> None:
    """Registers the scheduler, or says that it is alive and whether it leads."""
    statement = insert(Scheduler).values(id=scheduler_id, host=host, pid=pid, workers=workers, leading=leading)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["id"], set_={"seen_at": func.now(), "leading": leading, "workers": workers}
        )
    )
    if leading:
        session.execute(update(Scheduler).where(Scheduler.id != scheduler_id, Scheduler.leading).values(leading=False))


def schedulers_at_work(session: Session, *, except_id: uuid.UUID) -> tuple[SchedulerProcess, ...]:
    """The other schedulers whose attempts are still RUNNING: dead ones, or one that lost the lead."""
    at_work = select(Attempt.scheduler_id).where(Attempt.state == "RUNNING")
    rows = session.scalars(
        select(Scheduler).where(Scheduler.id != except_id, Scheduler.id.in_(at_work)).order_by(Scheduler.id)
    )
    return tuple(
        SchedulerProcess(id=row.id, host=row.host, pid=row.pid, started_at_s=row.started_at.timestamp()) for row in rows
    )


def leader_alive(session: Session, *, within_s: float = 15.0) -> bool:
    """Whether a leading scheduler was seen lately, by the database's clock."""
    horizon = func.now() - func.make_interval(0, 0, 0, 0, 0, 0, within_s)
    return session.scalar(select(func.count()).where(Scheduler.leading, Scheduler.seen_at > horizon)) != 0
