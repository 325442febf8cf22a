"""Errors of the API, and the one table that says how each leaves it.

::

    ApiError
    ├── ResourceNotFoundError         no such grid, fit or series
    ├── MalformedBodyError            the body is no JSON or YAML at all
    ├── InvalidRequestError           values that are not allowed, each with its place
    │   ├── InvalidCursorError        a cursor that this list did not hand out for these filters
    │   └── CorpusNotResolvedError    a corpus given by a name instead of its hash
    ├── UnsupportedMediaTypeError     a body of a type that the endpoint does not read
    ├── BodyTooLargeError             a body above the endpoint's limit
    ├── IdempotencyKeyReusedError     a key that came with another payload before
    ├── IdempotencyKeyBusyError       the first request with this key has not ended
    ├── SeriesAmbiguousError          several series exist and none was named
    ├── TooFewObservationsError       a series cannot be fitted yet
    ├── ImportConflictError           rows have other values than what is observed already
    └── FitNotReadyError              no successful fit to predict with

Every answer that is not a success is `application/problem+json` (RFC 9457). What carries no name here leaves as
`internal`, without its message: messages of foreign errors may hold secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.methods import HeadLikeGet, allowed_methods
from api.models_predictions import ALTERNATIVES
from database.errors import DatabaseUnavailableError, SchemaError, VerbNotAllowedError
from fitting.errors import InvalidPointError, NotEnoughObservationsError
from orchestrator.errors import GridError, Problem

Place = Mapping[str, str | int]

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:longlaw:problem:"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKind:
    """How a kind of error leaves the API. `slug` follows `TYPE_PREFIX` in `type`; `title` never varies."""

    slug: str
    status: int
    title: str
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineProblem:
    """Something to mend in a table: on `line` of the body, from 1, the header's included."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


class ApiError(Exception):
    """Anything that the API itself refuses; the message is the problem's `detail`."""

    def __init__(self, detail: str, *, problems: Sequence[Problem | LineProblem] = ()) -> None:
        super().__init__(detail)
        self.problems = tuple(problems)


class ResourceNotFoundError(ApiError):
    """No such grid, fit or series."""


class MalformedBodyError(ApiError):
    """The body cannot be read at all."""


class InvalidRequestError(ApiError):
    """Values that are not allowed."""


class InvalidCursorError(InvalidRequestError):
    """The cursor was not handed out by this list for these filters."""


class CorpusNotResolvedError(InvalidRequestError):
    """A corpus is given by a name instead of its hash."""


class UnsupportedMediaTypeError(ApiError):
    """The endpoint does not read bodies of this type."""


class BodyTooLargeError(ApiError):
    """The body is above the endpoint's limit."""


class IdempotencyKeyReusedError(ApiError):
    """The key came with another payload before."""


class IdempotencyKeyBusyError(ApiError):
    """The first request with this key has not ended."""


class SeriesAmbiguousError(ApiError):
    """Several series exist and the request names none."""


class TooFewObservationsError(ApiError):
    """The series has fewer distinct observations than the law has parameters."""


class ImportConflictError(ApiError):
    """Rows of an import have other values than what is observed already, or than one another."""


class FitNotReadyError(ApiError):
    """There is no successful fit to predict with."""


_INVALID = ProblemKind(slug="invalid-request", status=422, title="The request holds values that are not allowed")
_TOO_FEW = ProblemKind(slug="too-few-observations", status=409, title="There are too few observations for a fit")
_DATABASE = ProblemKind(slug="database-unavailable", status=503, title="The database does not answer", retry_after_s=5)
INTERNAL = ProblemKind(slug="internal", status=500, title="Something went wrong on the server")

#: Error -> problem. The nearest class in the error's ancestry decides.
PROBLEMS: dict[type[Exception], ProblemKind] = {
    ResourceNotFoundError: ProblemKind(slug="not-found", status=404, title="There is nothing here"),
    MalformedBodyError: ProblemKind(slug="malformed-body", status=400, title="The body cannot be read"),
    InvalidRequestError: _INVALID,
    RequestValidationError: _INVALID,
    InvalidPointError: _INVALID,
    InvalidCursorError: ProblemKind(slug="invalid-cursor", status=422, title="The cursor does not fit this list"),
    CorpusNotResolvedError: ProblemKind(
        slug="corpus-not-resolved", status=422, title="A corpus must be named by its hash"
    ),
    GridError: ProblemKind(slug="invalid-grid", status=422, title="The grid cannot be used"),
    UnsupportedMediaTypeError: ProblemKind(
        slug="unsupported-media-type", status=415, title="The endpoint does not read this type of body"
    ),
    BodyTooLargeError: ProblemKind(slug="body-too-large", status=413, title="The body is too large"),
    IdempotencyKeyReusedError: ProblemKind(
        slug="idempotency-key-reused", status=422, title="The idempotency key belongs to another request"
    ),
    IdempotencyKeyBusyError: ProblemKind(
        slug="idempotency-key-busy", status=409, title="A request with this key is running", retry_after_s=1
    ),
    SeriesAmbiguousError: ProblemKind(slug="series-ambiguous", status=409, title="Several series exist: name one"),
    TooFewObservationsError: _TOO_FEW,
    NotEnoughObservationsError: _TOO_FEW,
    ImportConflictError: ProblemKind(slug="import-conflict", status=409, title="Rows contradict what is observed"),
    FitNotReadyError: ProblemKind(slug="fit-not-ready", status=409, title="There is no fit to predict with yet"),
    VerbNotAllowedError: ProblemKind(
        slug="verb-not-allowed", status=409, title="The state of the grid does not allow this"
    ),
    DatabaseUnavailableError: _DATABASE,
    OperationalError: _DATABASE,
    InterfaceError: _DATABASE,
    PoolTimeoutError: ProblemKind(
        slug="overloaded", status=503, title="Too many requests are waiting for the database", retry_after_s=1
    ),
    SchemaError: ProblemKind(slug="schema-mismatch", status=503, title="The database and the code do not fit together"),
    Exception: INTERNAL,
}

#: What the framework itself raises: unknown paths and verbs.
HTTP_PROBLEMS: dict[int, ProblemKind] = {
    404: PROBLEMS[ResourceNotFoundError],
    405: ProblemKind(slug="method-not-allowed", status=405, title="The path does not know this method"),
    400: PROBLEMS[MalformedBodyError],
    413: PROBLEMS[BodyTooLargeError],
}

#: Kinds whose own message is not passed on: it is foreign, and may hold addresses, names or statements.
_SILENT = (DBAPIError, PoolTimeoutError, DatabaseUnavailableError)
_MAX_PROBLEMS = 50


def problem_kind(error: Exception) -> ProblemKind:
    """The entry of `PROBLEMS` for the nearest class in the error's ancestry."""
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)


def problem_response(
    kind: ProblemKind,
    detail: str,
    *,
    errors: Sequence[Place] = (),
    members: Mapping[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An RFC 9457 answer; `errors` holds the first 50 single places: a `pointer`, a `line` or a `parameter` each.

    `members` are what a kind of problem says beyond that.
    """
    body: dict[str, Any] = {
        "type": TYPE_PREFIX + kind.slug,
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        **(members or {}),
    }
    if errors:
        body["errors"] = list(errors[:_MAX_PROBLEMS])
    headers = dict(headers or {})
    if kind.retry_after_s is not None:
        headers["Retry-After"] = str(kind.retry_after_s)
    return JSONResponse(body, status_code=kind.status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Makes every error of `app` leave as a problem."""
    app.add_middleware(_LastResort)
    app.add_middleware(HeadLikeGet)
    app.add_exception_handler(HTTPException, _http)
    for kind in PROBLEMS:
        if kind is not Exception:
            app.add_exception_handler(kind, _named)


class _LastResort:
    """Answers what has no name with `internal`, and logs it.

    A handler for `Exception` would not do: the framework raises the error again after it, and the server then cuts the
    connection under the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            _log.exception("%s %s", scope["method"], scope["path"])
            answer = problem_response(
                INTERNAL, "The error was logged. Nothing that this request asked for was half-stored."
            )
            await answer(scope, receive, send)


def pointer(path: Sequence[str | int]) -> str:
    """The RFC 6901 JSON Pointer of a place in a body."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = HTTP_PROBLEMS.get(error.status_code, INTERNAL)
    details = {
        404: f"No resource at {request.url.path}.",
        405: f"{request.method} is not a method of {request.url.path}.",
    }
    headers = {"Allow": allowed_methods(request)} if error.status_code == 405 else dict(error.headers or {})
    return problem_response(kind, details.get(error.status_code, str(error.detail)), headers=headers)


async def _named(request: Request, error: Exception) -> JSONResponse:
    kind = problem_kind(error)
    if isinstance(error, _SILENT):
        _log.warning("%s %s: %s", request.method, request.url.path, type(error).__name__)
        return problem_response(kind, kind.title + "; try again in a moment.")
    if isinstance(error, RequestValidationError):
        found = list(error.errors())
        if any(item["loc"][:1] == ("path",) for item in found):  # an id that cannot be one names nothing
            return problem_response(PROBLEMS[ResourceNotFoundError], f"No resource at {request.url.path}.")
        errors = [_place(item) for item in found]
        return problem_response(kind, _summary(errors), errors=errors)
    if isinstance(error, GridError):
        errors = [{"pointer": item.pointer, "message": item.message} for item in error.problems]
        return problem_response(kind, _summary(errors), errors=errors)
    if isinstance(error, VerbNotAllowedError):
        members = {"state": error.state, "legal_verbs": error.verbs}
        return problem_response(kind, str(error), members=members)
    problems = error.problems if isinstance(error, ApiError) else ()
    return problem_response(kind, str(error), errors=[_shown(item) for item in problems])


def _shown(problem: Problem | LineProblem) -> Place:
    if isinstance(problem, LineProblem):
        return {"line": problem.line, "message": problem.message}
    return {"pointer": problem.pointer, "message": problem.message}


def message_of(item: Mapping[str, Any]) -> str:
    """Pydantic's message in our words."""
    return str(item["msg"]).removeprefix("Value error, ")


def _place(item: dict[str, Any]) -> dict[str, str]:
    """Pydantic's place in our words: a JSON Pointer into the body, or the name of a query parameter or header."""
    where, *path = item["loc"]
    message = message_of(item)
    if where == "body":
        return {"pointer": pointer([part for part in path if part not in ALTERNATIVES]), "message": message}
    return {"parameter": ".".join(str(part) for part in path), "message": message}


def _summary(errors: Sequence[dict[str, str]]) -> str:
    first = errors[0]
    place = first.get("pointer") or first.get("parameter")
    text = f"{place}: {first['message']}" if place else first["message"]
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more)"
