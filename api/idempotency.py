"""`Idempotency-Key`: a creating request that is repeated gets its first answer again."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header
from sqlalchemy.orm import Session

from api.errors import IdempotencyKeyBusyError, IdempotencyKeyReusedError
from database.idempotency import hold_key, stored_answer

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=255, description="Makes a repeated request harmless: it gets the first answer."),
]
REPLAYED = {"Idempotent-Replayed": "true"}


def earlier_answer(session: Session, key: str, request_hash: str) -> str | None:
    """The body that this request was answered with before; while we look and answer, nobody else does.

    Raises:
        IdempotencyKeyBusyError: somebody does.
        IdempotencyKeyReusedError: the key came with another request.
    """
    if not hold_key(session, key):
        raise IdempotencyKeyBusyError("The first request with this key is still running; ask again in a moment.")
    answer = stored_answer(session, key)
    if answer is None:
        return None
    if answer.request_hash != request_hash:
        raise IdempotencyKeyReusedError("This key came with another request before. Use a new key for each new one.")
    return answer.body
