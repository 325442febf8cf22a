"""Keyset paging: a page ends with a cursor that names its last row, not its number, so rows that arrive or go while
someone pages are neither lost nor doubled.

A cursor is opaque to clients. It carries the sort key of the last row and a digest of the list and its filters, so that
it cannot be used with others.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Annotated

from fastapi import Query

from api.errors import InvalidCursorError

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Rows per page.")]
Cursor = Annotated[str | None, Query(max_length=1024, description="`next_cursor` of the page before.")]

INT64_MAX = 2**63 - 1
KeyPart = str | int | float


def encode_cursor(key: Sequence[KeyPart], scope: Sequence[object]) -> str:
    """The cursor after the row with the sort key `key`, in the list that `scope` (its name and filters) describes."""
    text = json.dumps([_digest(scope), *key], separators=(",", ":"), allow_nan=False)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, kinds: Sequence[type], scope: Sequence[object]) -> tuple[KeyPart, ...] | None:
    """The sort key inside `cursor`, one part of each of `kinds`; None without a cursor.

    Raises:
        InvalidCursorError: it was not handed out by this list with these filters.
    """
    if cursor is None:
        return None
    try:
        parts = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        raise InvalidCursorError("The cursor is damaged: begin again without one.") from None
    if not isinstance(parts, list) or [type(part) for part in parts] != [str, *kinds]:
        raise InvalidCursorError("The cursor is damaged: begin again without one.")
    digest, *key = parts
    if any(isinstance(part, int) and abs(part) > INT64_MAX for part in key):
        raise InvalidCursorError("The cursor is damaged: begin again without one.")
    if digest != _digest(scope):
        raise InvalidCursorError("The cursor belongs to another list or other filters: begin again without one.")
    return tuple(key)


def time_key(key: tuple[KeyPart, ...] | None) -> tuple[dt.datetime, uuid.UUID] | None:
    """The sort key (`created_at`, `id`) inside a decoded cursor.

    Raises:
        InvalidCursorError: the parts are no time and no id.
    """
    if key is None:
        return None
    created_at, row_id = key
    try:
        return dt.datetime.fromisoformat(str(created_at)), uuid.UUID(str(row_id))
    except ValueError:
        raise InvalidCursorError("The cursor is damaged: begin again without one.") from None


def _digest(scope: Sequence[object]) -> str:
    text = json.dumps([None if item is None else str(item) for item in scope])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
