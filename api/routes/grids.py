"""Grids: plan them, submit them, see how far they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from api import conditional
from api.dependencies import ResourceId, Sessions, body_up_to, media_type
from api.errors import (
    CorpusNotResolvedError,
    MalformedBodyError,
    ResourceNotFoundError,
    UnsupportedMediaTypeError,
)
from api.idempotency import REPLAYED, IdempotencyKey, earlier_answer
from api.models import Cell, GridCreated, GridDetail, GridSummary, Page
from api.paging import DEFAULT_LIMIT, Cursor, Limit, decode_cursor, encode_cursor, time_key
from database.idempotency import store_answer
from database.reading import grid_document, grid_exists, grid_standing, list_grids, reading
from database.reading_cells import list_cells
from orchestrator.errors import Problem
from orchestrator.grid import Grid, parse_grid
from orchestrator.grid_file import MAX_DOCUMENT_BYTES, DocumentFormat, read_document
from orchestrator.grid_problems import pointer
from orchestrator.layout import lay_out
from orchestrator.plan import plan_of
from orchestrator.plan_document import plan_document
from orchestrator.recipe import ReferenceSettings
from orchestrator.submit import known, submit
from workers.spec import content_hash

_FORMATS: dict[str, DocumentFormat] = {
    "application/json": "json",
    "application/yaml": "yaml",
    "application/x-yaml": "yaml",
    "text/yaml": "yaml",
}
_HASH = re.compile(r"[0-9a-f]{32}")
_BODY = {
    "requestBody": {
        "required": True,
        "description": "A grid file, as YAML or JSON.",
        "content": {name: {"schema": {"type": "object"}} for name in ("application/json", "application/yaml")},
    }
}

router = APIRouter(prefix="/v1", tags=["grids"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """A grid file as it came (`document`, numbers still as written) and as it was understood."""

    document: dict[str, Any]
    grid: Grid


def _submission(request: Request, body: Annotated[bytes, Depends(body_up_to(MAX_DOCUMENT_BYTES))]) -> _Submission:
    kind = media_type(request)
    if kind not in _FORMATS:
        raise UnsupportedMediaTypeError(
            f"Send a grid as application/json or application/yaml, not {kind or 'untyped'}."
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise MalformedBodyError(f"The body is not UTF-8: byte {error.start} cannot be read.") from None
    document = read_document(text, format=_FORMATS[kind])
    return _Submission(document=document, grid=parse_grid(document))


Submission = Annotated[_Submission, Depends(_submission)]


@router.post("/grids:plan", openapi_extra=_BODY)
def plan_grid(submission: Submission, sessions: Sessions) -> dict[str, Any]:
    """What a grid would train and cost, beside what exists already; nothing is stored.

    `cells`, `segments` and `evaluations` are counts; `tokens`, `flops`, `gpu_hours` and `checkpoint_bytes` price what
    is missing; the lists are in `*_detail`.
    """
    layout = lay_out(submission.grid)
    with reading(sessions) as session:
        seen = known(session, layout)
    document = plan_document(plan_of(layout, seen))
    document["warnings"] += [
        {"pointer": problem.pointer, "message": f"{problem.message}: what exists for it is not known here"}
        for problem in _unresolved(submission.grid)
    ]
    return document


@router.post(
    "/grids",
    status_code=201,
    response_class=Response,
    responses={
        201: {"model": GridCreated, "content": {"application/json": {}}, "description": "The grid is launched."}
    },
    openapi_extra=_BODY,
)
def create_grid(
    submission: Submission,
    sessions: Sessions,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Launches a grid: everything it needs and does not find is queued.

    A replayed answer carries `Idempotent-Replayed: true`.
    """
    if unresolved := _unresolved(submission.grid):
        raise CorpusNotResolvedError(
            "The service knows corpora by their hashes. `longlaw grid submit` looks names up in its store; build a "
            "corpus there with `longlaw data build`, which prints its hash.",
            problems=unresolved,
        )
    request_hash = content_hash(submission.grid.model_dump(mode="json"))
    with sessions.begin() as session:
        if idempotency_key is not None:
            answer = earlier_answer(session, idempotency_key, request_hash)
            if answer is not None:
                return _created(GridCreated.model_validate_json(answer), replayed=True)
        submitted = submit(session, submission.grid, document=submission.document)
        plan_summary = {
            name: value for name, value in plan_document(submitted.plan).items() if not name.endswith("_detail")
        }
        created = GridCreated(id=str(submitted.grid_id), name=submission.grid.name, plan=plan_summary)
        if idempotency_key is not None:
            store_answer(session, idempotency_key, request_hash=request_hash, body=created.model_dump_json())
    return _created(created, replayed=False)


@router.get("/grids")
def get_grids(sessions: Sessions, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[GridSummary]:
    """Grids, newest first."""
    scope = ("grids",)
    after = time_key(decode_cursor(cursor, (str, str), scope))
    with reading(sessions) as session:
        rows = list_grids(session, after=after, limit=limit + 1)
    last = rows[limit - 1] if len(rows) > limit else None
    following = encode_cursor((last.created_at.isoformat(), str(last.id)), scope) if last else None
    return Page(items=tuple(GridSummary.of(row) for row in rows[:limit]), next_cursor=following)


@router.get("/grids/{grid_id}")
def get_grid(grid_id: ResourceId, sessions: Sessions) -> GridDetail:
    """One grid: its state, progress by scale, what runs, and what waits for what."""
    with reading(sessions) as session:
        standing = grid_standing(session, grid_id)
    if standing is None:
        raise ResourceNotFoundError(f"There is no grid {grid_id}.")
    return GridDetail.of(standing.grid, standing.progress, standing)


@router.get(
    "/grids/{grid_id}/document",
    response_model=dict[str, Any],
    responses=conditional.NOT_MODIFIED,
)
def get_document(grid_id: ResourceId, sessions: Sessions, request: Request) -> Response:
    """The grid file as it was submitted, each number a text as it was written: plan or submit it again as it is.

    It never changes: the answer carries an ETag, and `If-None-Match` with it gets a 304.
    """
    with reading(sessions) as session:
        document = grid_document(session, grid_id)
    if document is None:
        raise ResourceNotFoundError(f"There is no grid {grid_id}.")
    return conditional.immutable(request, to_json(document))


@router.get("/grids/{grid_id}/cells")
def get_cells(
    grid_id: ResourceId, sessions: Sessions, limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None
) -> Page[Cell]:
    """The cells of a grid: state, measured values, and what those wait for that have none."""
    scope = ("cells", grid_id)
    after = decode_cursor(cursor, (int,), scope)
    with reading(sessions) as session:
        if not grid_exists(session, grid_id):
            raise ResourceNotFoundError(f"There is no grid {grid_id}.")
        rows = list_cells(session, grid_id, after=None if after is None else int(after[0]), limit=limit + 1)
    following = encode_cursor((rows[limit - 1].id,), scope) if len(rows) > limit else None
    return Page(items=tuple(Cell.of(row) for row in rows[:limit]), next_cursor=following)


def _created(created: GridCreated, *, replayed: bool) -> Response:
    headers = {"Location": f"/v1/grids/{created.id}"} | (REPLAYED if replayed else {})
    return Response(created.model_dump_json(), status_code=201, media_type="application/json", headers=headers)


def _unresolved(grid: Grid) -> list[Problem]:
    """Corpora that are not given by hash: a name means something on one machine only, so it is never stored."""
    return [
        Problem(pointer=place, message=f"{corpus!r} is not a corpus hash (32 hexadecimal digits)")
        for place, corpus in _corpora(grid, "")
        if not _HASH.fullmatch(corpus)
    ]


def _corpora(value: object, at: str) -> Iterator[tuple[str, str]]:
    """Every corpus that a grid mentions, however deep, with its JSON Pointer."""
    parts: dict[Any, object]
    if isinstance(value, BaseModel):
        parts = {field.alias or name: getattr(value, name) for name, field in type(value).model_fields.items()}
        key = "digest" if isinstance(value, ReferenceSettings) and value.kind == "copy" else "corpus"
        if isinstance(corpus := parts.pop(key, None), str):
            yield at + pointer(key), corpus
    elif isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, tuple):
        parts = dict(enumerate(value))
    else:
        parts = {}
    for name, part in parts.items():
        yield from _corpora(part, at + pointer(name))
