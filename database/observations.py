"""Observations: what the law is fitted to. A measured evaluation is one observation in each series that asks for it."""

from __future__ import annotations

import uuid

from sqlalchemy import and_, case, literal, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from database.models import Cell, CellEvaluation, Evaluation, GridEvaluation, Observation, Series


def record_observations(
    session: Session, *, evaluation_key: str | None = None, grid_id: uuid.UUID | None = None
) -> int:
    """Inserts the observations that measured evaluations make and that are not there yet; returns how many.

    An evaluation without a value (no token qualified) and the diagnostic at D_l = 0 make none, nor does what a grid no
    longer asked for when it was measured.

    Args:
        evaluation_key: look at this evaluation only.
        grid_id: look at the cells of this grid only.
    """
    y = case(
        (Series.metric == "log_longppl", Evaluation.log_longppl),
        (Series.metric == "log_shortppl", Evaluation.log_shortppl),
        (Series.metric == "log_ppl", Evaluation.log_ppl),
    )
    y_se = case(
        (Series.metric == "log_longppl", Evaluation.log_longppl_se),
        (Series.metric == "log_shortppl", Evaluation.log_shortppl_se),
        (Series.metric == "log_ppl", Evaluation.log_ppl_se),
    )
    columns = (
        CellEvaluation.series_id,
        CellEvaluation.evaluation_key,
        Evaluation.scale,
        Evaluation.n_params,
        Evaluation.short_tokens,
        Evaluation.long_tokens,
        Evaluation.short_seed,
        Evaluation.long_seed,
        Evaluation.cluster,
    )
    measured = (
        select(*columns, y.label("y"), y_se.label("y_se"))
        .join(Evaluation, Evaluation.key == CellEvaluation.evaluation_key)
        .join(Series, Series.id == CellEvaluation.series_id)
        .join(Cell, Cell.id == CellEvaluation.cell_id)
        .join(
            GridEvaluation,
            and_(
                GridEvaluation.grid_id == Cell.grid_id, GridEvaluation.evaluation_key == CellEvaluation.evaluation_key
            ),
        )
        .where(Evaluation.state == "SUCCEEDED", y.is_not(None), Evaluation.long_tokens > 0)
        .where(GridEvaluation.closed_as.is_(None))
        .distinct()
    )
    if evaluation_key is not None:
        measured = measured.where(CellEvaluation.evaluation_key == evaluation_key)
    if grid_id is not None:
        measured = measured.where(Cell.grid_id == grid_id)
    rows = measured.subquery()
    names = [column.name for column in rows.c]
    statement = (
        insert(Observation)
        .from_select([*names, "source"], select(*rows.c, literal("run")))
        .on_conflict_do_nothing(index_elements=["series_id", "evaluation_key"])
        .returning(Observation.id)
    )
    return len(session.scalars(statement).all())
