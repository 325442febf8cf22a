"""Answers to creating requests, kept in the transaction of what they created: a repeated request gets the same one.

Outcomes that created nothing are not kept: repeating such a request is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from database.models import IdempotencyKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """What the first request with this key was answered, to the letter, and the hash of what it asked."""

    request_hash: str
    body: str


def hold_key(session: Session, key: str) -> bool:
    """Whether nobody else is answering a request with this key; if so, nobody will until the transaction ends."""
    return bool(session.scalar(select(func.pg_try_advisory_xact_lock(func.hashtextextended(key, 0)))))


def stored_answer(session: Session, key: str) -> StoredAnswer | None:
    """The answer kept for `key`; None if there is none yet."""
    row = session.get(IdempotencyKey, key)
    return None if row is None else StoredAnswer(request_hash=row.request_hash, body=row.response["body"])


def store_answer(session: Session, key: str, *, request_hash: str, body: str) -> None:
    """Keeps an answer, if the transaction commits."""
    session.add(IdempotencyKey(key=key, request_hash=request_hash, response={"body": body}))
