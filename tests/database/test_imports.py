"""Observations from elsewhere: stored once, found again, never contradicted."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from database.engine import session_factory
from database.errors import Conflict, ObservationConflictError
from database.fits import queue_fits
from database.imports import ImportedRow, ImportedSeries, import_observations
from database.models import Event, Fit, Observation, Series
from tests.database.seeding import points

SERIES = ImportedSeries(
    name="ours", protocol="constant", rule="raw", metric="log_longppl", evaluator="ours", family="ours"
)


def _row(long_tokens: int = 1_000, **changes: Any) -> ImportedRow:
    row = ImportedRow(
        scale="S",
        n_params=31_000_000,
        short_tokens=2_790_000_000,
        long_tokens=long_tokens,
        short_seed=0,
        long_seed=0,
        cluster="S/2790000000/0",
        y=1.75,
        y_se=None,
    )
    return replace(row, **changes)


def _stored(session: Session) -> int:
    return session.scalars(select(func.count()).select_from(Observation)).one()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ImportedSeries)])
def test_a_series_of_imports_is_all_that_its_description_says(field: str) -> None:
    other = replace(SERIES, **{field: "another"})
    assert replace(SERIES).id == SERIES.id != other.id
    assert "another" in other.label


def test_rows_that_come_later_extend_the_series_and_known_ones_are_found_again(session: Session) -> None:
    first = import_observations(session, SERIES, [_row(1), _row(2, y=1.5, y_se=0.25)])
    again = import_observations(session, SERIES, [_row(2, y=1.5, y_se=0.25), _row(3), _row(3)])
    assert (first.series_id, first.label) == (again.series_id, again.label) == (SERIES.id, SERIES.label)
    assert (first.inserted, first.found_again, first.points) == (2, 0, 2)
    assert (again.inserted, again.found_again, again.points) == (1, 2, 3)
    rows = session.scalars(select(Observation).order_by(Observation.long_tokens)).all()
    assert [(row.long_tokens, row.y, row.y_se) for row in rows] == [(1, 1.75, None), (2, 1.5, 0.25), (3, 1.75, None)]
    assert {(row.series_id, row.source, row.evaluation_key) for row in rows} == {(SERIES.id, "imported", None)}
    events = session.scalars(select(Event).where(Event.kind == "observations_imported").order_by(Event.id)).all()
    assert [(event.subject, event.payload["observations"]) for event in events] == [(SERIES.id, 2), (SERIES.id, 1)]


def test_an_import_that_brings_nothing_new_leaves_no_event(session: Session) -> None:
    for expected in (1, 0):
        assert import_observations(session, SERIES, [_row()]).inserted == expected
    assert session.scalars(select(func.count()).where(Event.kind == "observations_imported")).one() == 1


@pytest.mark.parametrize(
    "change",
    [{"y": 1.7500000000000002}, {"y_se": 0.1}, {"scale": "T"}, {"cluster": "another"}],
    ids=lambda change: next(iter(change)),
)
def test_a_known_row_with_another_value_refuses_the_whole_import(session: Session, change: dict[str, Any]) -> None:
    import_observations(session, SERIES, [_row()])
    stored = session.scalars(select(Observation)).one()
    with pytest.raises(ObservationConflictError) as refused, session.begin_nested():
        import_observations(session, SERIES, [_row(5), _row(**change), _row(6)])
    ((column, given),) = change.items()
    other = getattr(stored, column)
    assert refused.value.conflicts == (
        Conflict(row=1, with_row=None, observation_id=stored.id, column=column, given=given, other=other),
    )
    assert _stored(session) == 1


def test_rows_that_contradict_one_another_are_all_named(session: Session) -> None:
    rows = [_row(1), _row(2), _row(1, y=2.0), _row(3), _row(1, y=3.0), _row(2)]
    with pytest.raises(ObservationConflictError) as refused:
        import_observations(session, SERIES, rows)
    assert [(item.row, item.with_row, item.given) for item in refused.value.conflicts] == [(2, 0, 2.0), (4, 0, 3.0)]
    assert _stored(session) == 0
    assert session.scalars(select(func.count()).select_from(Series)).one() == 0


def test_seeds_and_unknown_budgets_tell_rows_apart(session: Session) -> None:
    rows = [_row(), _row(long_seed=1, y=1.0), _row(short_seed=1, y=2.0), _row(short_tokens=None, y=3.0)]
    assert import_observations(session, SERIES, rows).inserted == 4
    again = import_observations(session, SERIES, rows)
    assert (again.inserted, again.found_again) == (0, 4)
    assert again.points == 1, "the law has a term of D_s, and only seeds differ"


def test_sizes_are_exact_up_to_the_largest_count(session: Session) -> None:
    sizes = (2**53 + 1, 2**53 + 2, 2**63 - 1)
    import_observations(session, SERIES, [_row(n_params=size, short_tokens=size, long_tokens=size) for size in sizes])
    columns = (Observation.n_params, Observation.short_tokens, Observation.long_tokens)
    assert {tuple(row) for row in session.execute(select(*columns))} == {(size,) * 3 for size in sizes}


def test_the_database_itself_holds_each_imported_row_once(session: Session) -> None:
    import_observations(session, SERIES, [_row(short_tokens=None)])
    again = (
        "INSERT INTO observations (series_id, scale, n_params, long_tokens, short_seed, long_seed, cluster, y, source)"
        " SELECT series_id, scale, n_params, long_tokens, short_seed, long_seed, cluster, 9, source FROM observations"
    )
    with pytest.raises(IntegrityError, match="uq_observations_imported"), session.begin_nested():
        session.execute(text(again))


def test_seven_points_are_fitted_and_six_are_not(session: Session) -> None:
    rows = [_row(n_params=n, short_tokens=s, long_tokens=ell, scale=scale) for scale, n, s, ell in points()]
    unknown = _row(short_tokens=None)
    import_observations(session, SERIES, [*rows[:6], unknown])
    assert queue_fits(session, debounce_s=60) == 0
    import_observations(session, SERIES, rows[:7])
    assert queue_fits(session, debounce_s=60) == 1, "nothing else is on its way, so nothing is waited for"
    assert session.scalars(select(Fit.series_id)).one() == SERIES.id


def test_rows_keep_their_order(session: Session) -> None:
    import_observations(session, SERIES, [_row(n) for n in (3, 1, 2)])
    assert session.scalars(select(Observation.long_tokens).order_by(Observation.id)).all() == [3, 1, 2]


def test_imports_at_once_store_every_row_once(engine: Engine) -> None:
    """Four transactions bring the same rows to a new series, in different orders."""
    rows = [_row(long_tokens) for long_tokens in range(1, 101)]
    orders = [rows, rows[::-1], rows[50:] + rows[:50], rows[::2] + rows[1::2]]
    inserted: list[int] = []
    barrier = threading.Barrier(len(orders))

    def bring(order: list[ImportedRow]) -> None:
        barrier.wait()
        with session_factory(engine).begin() as session:
            inserted.append(import_observations(session, SERIES, order).inserted)

    threads = [threading.Thread(target=bring, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inserted) == len(orders), "none has failed"
    assert sum(inserted) == len(rows)
    with session_factory(engine)() as session:
        assert _stored(session) == len(rows)


def test_of_two_imports_at_once_that_contradict_each_other_one_is_refused(engine: Engine) -> None:
    outcomes: list[object] = []
    sessions = session_factory(engine)
    with sessions.begin() as session:
        import_observations(session, SERIES, [_row(1)])

    def bring(later: ImportedRow) -> None:
        try:
            with sessions.begin() as session:
                outcomes.append(import_observations(session, SERIES, [later, _row(7)]).inserted)
        except ObservationConflictError as error:
            outcomes.append([(item.row, item.given, item.other) for item in error.conflicts])

    with sessions.begin() as session:
        import_observations(session, SERIES, [_row(2, y=1.0)])
        waiting = threading.Thread(target=bring, args=(_row(2, y=2.0),))
        waiting.start()
        waiting.join(timeout=0.2)
        assert outcomes == [], "it waits for what the first one makes of the row"
    waiting.join()
    assert outcomes == [[(0, 2.0, 1.0)]]
    with sessions() as session:
        assert sorted(session.scalars(select(Observation.long_tokens))) == [1, 2]
