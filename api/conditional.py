"""Answers that their readers may keep: each has a strong ETag, and who has it already gets a 304 (RFC 9110, 13)."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import Request, Response

#: For what never changes: a fit that has ended, a grid as it was submitted.
IMMUTABLE = "public, max-age=31536000, immutable"
#: What OpenAPI says of a route that may answer so.
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "`If-None-Match` names what there is."}}


def entity_tag(content: bytes) -> str:
    """The strong ETag of a body: other bytes, another tag."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def answer(request: Request, content: bytes, *, tag: str, media_type: str, cache: str) -> Response:
    """The body, or a 304 without it where `If-None-Match` names its tag."""
    headers = {"Cache-Control": cache, "ETag": tag}
    known = [item.strip().removeprefix("W/") for item in request.headers.get("if-none-match", "").split(",")]
    if tag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


def immutable(request: Request, content: bytes) -> Response:
    """JSON that never changes."""
    return answer(request, content, tag=entity_tag(content), media_type="application/json", cache=IMMUTABLE)
