"""Imports: observations that were measured elsewhere, all of a table or nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from api import csv_export
from api.dependencies import Sessions, body_up_to, media_type
from api.errors import ImportConflictError, LineProblem, UnsupportedMediaTypeError
from api.idempotency import REPLAYED, IdempotencyKey, earlier_answer
from api.json_body import read_json
from api.models_imports import ImportedObservation, ObservationImport, ObservationsImported, SeriesDescription
from api.observation_tables import read_table
from api.openapi import body_schema
from database.errors import Conflict, ObservationConflictError
from database.idempotency import store_answer
from database.imports import Imported, ImportedRow, ImportedSeries, import_observations
from fitting.laws import LONG_CONTEXT
from orchestrator.errors import Problem
from workers.spec import content_hash

MAX_BODY_BYTES = 16 * 1024 * 1024
_COLUMNS = {"y": "log_longppl", "y_se": "log_longppl_se"}

router = APIRouter(prefix="/v1", tags=["observations"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """A series and its rows; `name_row` says what a row is called in the body, from its number."""

    series: ImportedSeries
    rows: tuple[ImportedRow, ...]
    lines: tuple[int, ...] | None

    def problem(self, conflict: Conflict) -> Problem | LineProblem:
        """A conflict at its place in the body."""
        at = f"observation {conflict.observation_id}" if conflict.with_row is None else self._place(conflict.with_row)
        column = _COLUMNS.get(conflict.column, conflict.column)
        message = f"{column} is {conflict.given}, and {conflict.other} in {at}, of the same N, D_s, D_l and seeds"
        if self.lines is not None:
            return LineProblem(line=self.lines[conflict.row], message=message)
        return Problem(pointer=self._place(conflict.row), message=message)

    def _place(self, row: int) -> str:
        return f"/observations/{row}" if self.lines is None else f"line {self.lines[row]}"


def _wanted(
    request: Request,
    body: Annotated[bytes, Depends(body_up_to(MAX_BODY_BYTES))],
    name: Annotated[str | None, Query(description="Of a table: what the series is called.")] = None,
    protocol: Annotated[str | None, Query(description="Of a table: schedule of the long stage.")] = None,
    rule: Annotated[str | None, Query(description="Of a table: how checkpoints became models; `raw`.")] = None,
    metric: Annotated[str | None, Query(description="Of a table: what its values are; `log_longppl`.")] = None,
    evaluator: Annotated[str | None, Query(description="Of a table: a name for how it was measured.")] = None,
    family: Annotated[str | None, Query(description="Of a table: a name for the recipe.")] = None,
) -> _Import:
    said = {
        "name": name,
        "protocol": protocol,
        "rule": rule,
        "metric": metric,
        "evaluator": evaluator,
        "family": family,
    }
    described = {parameter: value for parameter, value in said.items() if value is not None}
    match media_type(request):
        case "application/json":
            if described:
                problem = "describes a table; in JSON the description is `series`"
                raise RequestValidationError([{"loc": ("query", item), "msg": problem} for item in described])
            asked = read_json(ObservationImport, body)
            return _import(asked.series, asked.observations, lines=None)
        case csv_export.MEDIA_TYPE:
            series = _described(described)
            table = read_table(body)
            return _import(series, [row.observation for row in table], lines=tuple(row.line for row in table))
        case other:
            raise UnsupportedMediaTypeError(
                f"Send observations as application/json or text/csv, not {other or 'untyped'}."
            )


@router.post(
    "/observations:import",
    response_class=Response,
    responses={
        200: {
            "model": ObservationsImported,
            "content": {"application/json": {}},
            "description": "All rows are stored.",
        }
    },
    openapi_extra=body_schema(ObservationImport, table=True),
)
def import_rows(
    wanted: Annotated[_Import, Depends(_wanted)], sessions: Sessions, idempotency_key: IdempotencyKey = None
) -> Response:
    """Stores results of somebody else's trainer in a series of their own, all of them or none; a law is fitted to them.

    As `text/csv` the series is described by query parameters. Rows that are there already are found again; one with
    another value refuses the import, since observations never change. A replayed answer carries
    `Idempotent-Replayed: true`.
    """
    request_hash = content_hash([wanted.series, wanted.rows])
    with sessions.begin() as session:
        if idempotency_key is not None:
            answer = earlier_answer(session, idempotency_key, request_hash)
            if answer is not None:
                return Response(answer, media_type="application/json", headers=REPLAYED)
        try:
            imported = _answer(import_observations(session, wanted.series, wanted.rows))
        except ObservationConflictError as error:
            problems = [wanted.problem(conflict) for conflict in error.conflicts]
            raise ImportConflictError(
                f"{problems[0]}. {len(problems):,} of {len(wanted.rows):,} rows contradict what is observed already, "
                "or one another; nothing was stored. Observations never change: import corrected ones as a series of "
                "another name, and tell repeated runs apart by their seeds.",
                problems=problems,
            ) from None
        body = imported.model_dump_json()
        if idempotency_key is not None:
            store_answer(session, idempotency_key, request_hash=request_hash, body=body)
    return Response(body, media_type="application/json")


def _described(parameters: dict[str, str]) -> SeriesDescription:
    try:
        return SeriesDescription.model_validate(parameters)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**item, "loc": ("query", *item["loc"])} for item in found]) from None


def _import(
    described: SeriesDescription, observations: Sequence[ImportedObservation], *, lines: tuple[int, ...] | None
) -> _Import:
    series = ImportedSeries(
        name=described.name,
        protocol=described.protocol,
        rule=described.rule,
        metric=described.metric,
        evaluator=described.evaluator or described.name,
        family=described.family or described.name,
    )
    return _Import(series=series, rows=tuple(_row(item) for item in observations), lines=lines)


def _row(given: ImportedObservation) -> ImportedRow:
    scale = given.scale or f"N={given.n_params}"
    short = "unknown" if given.short_tokens is None else given.short_tokens
    return ImportedRow(
        scale=scale,
        n_params=given.n_params,
        short_tokens=given.short_tokens,
        long_tokens=given.long_tokens,
        short_seed=given.short_seed,
        long_seed=given.long_seed,
        cluster=given.cluster or f"{scale}/{short}/{given.short_seed}",
        y=given.value,
        y_se=given.log_longppl_se,
    )


def _answer(imported: Imported) -> ObservationsImported:
    needed = LONG_CONTEXT.n_parameters
    note = None
    if imported.points < needed:
        note = f"A fit needs {needed} distinct points (N, D_s, D_l) with a known D_s; there are {imported.points}."
    elif imported.inserted == 0:
        note = "No row is new: the fits of the series stay what they are."
    return ObservationsImported(
        series_id=imported.series_id,
        label=imported.label,
        inserted=imported.inserted,
        found_again=imported.found_again,
        points=imported.points,
        fit_follows=note is None,
        note=note,
    )
