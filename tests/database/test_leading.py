"""One scheduler leads; another takes over when the leader's session ends."""

from __future__ import annotations

import time
import uuid

from sqlalchemy import Connection, Engine, func, select, update
from sqlalchemy.orm import Session

from database.leading import heartbeat, lead, leader_alive, schedulers_at_work
from database.models import Scheduler
from tests.database.work_rows import next_segment, scheduler_row, submitted


def test_one_session_leads_until_it_ends(engine: Engine) -> None:
    with engine.connect() as first, engine.connect() as second:
        assert lead(first)
        assert lead(first)
        assert not lead(second)
        first.invalidate()
        first.close()
        assert _eventually_leads(second)


def _eventually_leads(connection: Connection) -> bool:
    """The server notices a closed connection a moment later."""

    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        if lead(connection):
            return True
        time.sleep(0.02)
    return False


def test_leader_is_alive_while_it_is_seen(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        assert not leader_alive(session)
        scheduler_id = uuid.uuid4()
        heartbeat(session, scheduler_id=scheduler_id, host="here", pid=1, workers=2, leading=True)
        assert leader_alive(session)
        silent = func.now() - func.make_interval(0, 0, 0, 0, 0, 1)
        session.execute(update(Scheduler).values(seen_at=silent))
        assert not leader_alive(session)
        heartbeat(session, scheduler_id=scheduler_id, host="here", pid=1, workers=2, leading=True)
        assert leader_alive(session)
        heartbeat(session, scheduler_id=scheduler_id, host="here", pid=1, workers=2, leading=False)
        assert not leader_alive(session)


def test_new_leader_is_the_only_one(engine: Engine) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    with Session(engine) as session, session.begin():
        for scheduler_id in (first, second):
            heartbeat(session, scheduler_id=scheduler_id, host="here", pid=1, workers=2, leading=True)
        assert session.scalars(select(Scheduler.id).where(Scheduler.leading)).all() == [second]


def test_schedulers_with_running_attempts_are_found(engine: Engine) -> None:
    submitted(engine)
    idle, busy, other = scheduler_row(engine), scheduler_row(engine, host="there", pid=7), scheduler_row(engine)
    assert next_segment(engine, busy) is not None
    with Session(engine) as session:
        (found,) = schedulers_at_work(session, except_id=other)
        assert schedulers_at_work(session, except_id=busy) == ()
    assert (found.id, found.host, found.pid) == (busy, "there", 7)
    assert idle not in (found.id,)
