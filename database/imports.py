"""Observations that were not run here: results of somebody else's trainer, in series of their own.

A series of imports is what its description says, and its id is the hash of that: rows that come later under the same
description extend it, and no series of a grid can have the same id. A row is known by N, D_s, D_l and seeds; rows never
change, so one that comes again must come with the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from database.errors import Conflict, ObservationConflictError
from database.events import record_event
from database.models import Evaluator, Observation, Series
from database.reading import distinct_points
from workers.spec import content_hash

Identity = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSeries:
    """What an import says of its rows: one fit may pool those that agree in all of it.

    `evaluator` and `family` are names for whoever measured and for the recipe; where they are the series' own name,
    nothing else is known to be measured or trained alike.
    """

    name: str
    protocol: str
    rule: str
    metric: str
    evaluator: str
    family: str

    @property
    def id(self) -> str:
        return content_hash({"imported": self})

    @property
    def label(self) -> str:
        metric = () if self.metric == "log_longppl" else (self.metric,)
        said = {"recipe": self.family, "evaluator": self.evaluator}
        named = (f"{what} {name}" for what, name in said.items() if name != self.name)
        return f"{self.name}: {', '.join((*metric, self.protocol, self.rule))} ({', '.join(('imported', *named))})"

    @property
    def evaluator_spec(self) -> dict[str, str]:
        """Stands where an evaluator's specification does; no evaluation ever reads it."""
        return {"imported": self.evaluator}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRow:
    """A row to import. `y` is the series' metric in nats, `y_se` its standard error; D_s may be unknown."""

    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    cluster: str
    y: float
    y_se: float | None

    @property
    def identity(self) -> Identity:
        """As the unique index of imported observations has it."""
        return (self.n_params, self.short_tokens or 0, self.long_tokens, self.short_seed, self.long_seed)


_COLUMNS = tuple(field.name for field in fields(ImportedRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import came to. `points` are the distinct (N, D_s, D_l) of the whole series that the law can use."""

    series_id: str
    label: str
    inserted: int
    found_again: int
    points: int


def import_observations(session: Session, series: ImportedSeries, rows: Sequence[ImportedRow]) -> Imported:
    """Adds rows to a series of imports, in their order; those that are there already are found again.

    Other imports of the series wait until the transaction ends.

    Raises:
        ObservationConflictError: rows contradict one another or what is stored; the transaction must be rolled back.
    """
    first: dict[Identity, int] = {}
    repeated = [(at, index) for index, row in enumerate(rows) if (at := first.setdefault(row.identity, index)) != index]
    _refuse(_conflict(index, rows[index], rows[at], with_row=at) for at, index in repeated)
    _hold_series(session, series)
    stored = _stored(session, series.id)
    known = [(index, stored[identity]) for identity, index in first.items() if identity in stored]
    _refuse(_conflict(index, rows[index], row, observation_id=row_id) for index, (row_id, row) in known)
    new = [rows[index] for identity, index in first.items() if identity not in stored]
    if new:
        session.execute(
            insert(Observation),
            [
                {"series_id": series.id, "source": "imported", **{name: getattr(row, name) for name in _COLUMNS}}
                for row in new
            ],
        )
        record_event(session, "observations_imported", series.id, label=series.label, observations=len(new))
        session.flush()
    return Imported(
        series_id=series.id,
        label=series.label,
        inserted=len(new),
        found_again=len(rows) - len(new),
        points=distinct_points(session, series.id),
    )


def _hold_series(session: Session, series: ImportedSeries) -> None:
    """The series exists, and nobody else imports into it until the transaction ends."""
    evaluator_id = content_hash(series.evaluator_spec)
    evaluator = insert(Evaluator).values(id=evaluator_id, spec=series.evaluator_spec)
    session.execute(evaluator.on_conflict_do_nothing())
    session.execute(
        insert(Series)
        .values(
            id=series.id,
            family=series.family,
            protocol=series.protocol,
            rule=series.rule,
            evaluator_id=evaluator_id,
            metric=series.metric,
            label=series.label,
        )
        .on_conflict_do_nothing()
    )
    session.execute(select(Series.id).where(Series.id == series.id).with_for_update(key_share=True))


def _stored(session: Session, series_id: str) -> dict[Identity, tuple[int, ImportedRow]]:
    """What the series holds: each row with the id of its observation."""
    columns = [getattr(Observation, name) for name in _COLUMNS]
    there = select(Observation.id, *columns).where(Observation.series_id == series_id, Observation.source == "imported")
    rows = (
        (row_id, ImportedRow(**dict(zip(_COLUMNS, values, strict=True)))) for row_id, *values in session.execute(there)
    )
    return {row.identity: (row_id, row) for row_id, row in rows}


def _conflict(
    index: int,
    given: ImportedRow,
    other: ImportedRow,
    *,
    with_row: int | None = None,
    observation_id: int | None = None,
) -> Conflict | None:
    """The first thing that two rows of one identity differ in."""
    for column in _COLUMNS:
        asked, there = getattr(given, column), getattr(other, column)
        if asked != there:
            return Conflict(
                row=index,
                with_row=with_row,
                observation_id=observation_id,
                column=column,
                given=asked,
                other=there,
            )
    return None


def _refuse(found: Iterable[Conflict | None]) -> None:
    if conflicts := [conflict for conflict in found if conflict is not None]:
        raise ObservationConflictError(conflicts)
