"""What routes ask for: sessions of the results database, bodies of a bounded size, ids."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from api.errors import BodyTooLargeError


def _sessions(request: Request) -> sessionmaker[Session]:
    made: sessionmaker[Session] = request.app.state.sessions
    return made


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


Sessions = Annotated[sessionmaker[Session], Depends(_sessions)]
DatabaseEngine = Annotated[Engine, Depends(_engine)]
ResourceId = Annotated[uuid.UUID, Path(description="A UUID.")]


async def check_query(request: Request) -> None:
    """Refuses query parameters that an endpoint of the API does not have: a filter that is ignored lies.

    Raises:
        RequestValidationError: for such a parameter, for one that is given twice, and for NUL, which no
            text in Postgres can hold.
    """
    operations = request.app.openapi()["paths"].get(request.scope["route"].path, {})
    operation = operations.get(request.method.lower())
    if operation is None:  # a page, not a part of the API
        return
    known = sorted(item["name"] for item in operation.get("parameters", ()) if item["in"] == "query")
    problems = []
    given = [name for name, _ in request.query_params.multi_items()]
    for name, value in request.query_params.multi_items():
        if name not in known:
            hint = f"it has {', '.join(known)}" if known else "it has none"
            problems.append({"loc": ("query", name), "msg": f"no parameter of this endpoint; {hint}"})
        elif given.count(name) > 1:
            problems.append({"loc": ("query", name), "msg": "is given more than once; only one value can hold"})
        elif "\0" in value:
            problems.append({"loc": ("query", name), "msg": "must not contain NUL"})
    if problems:
        raise RequestValidationError(problems)


def body_up_to(max_bytes: int) -> Callable[[Request], Awaitable[bytes]]:
    """A dependency that reads the body, and gives up as soon as it is larger than `max_bytes`.

    Raises:
        BodyTooLargeError: from the dependency, before the whole body is in memory.
    """

    async def read(request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
        return bytes(body)

    return read


def media_type(request: Request) -> str:
    """The body's media type in lower case, without parameters; empty where the request names none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than {max_bytes // 1024:,} KiB, the most this endpoint reads.")
