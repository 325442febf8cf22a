"""Lists and counts in the time that what is unfinished takes: indexes, and `research.grids` counting from them.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

#: (name, table, columns, what it holds beside them, which rows)
INDEXES: tuple[tuple[str, str, list[str], list[str], str | None], ...] = (
    ("ix_segments_reopened", "segments", ["key", "generation"], [], "generation > 1"),
    ("ix_evaluations_reopened", "evaluations", ["key", "generation"], [], "generation > 1"),
    (
        "ix_evaluations_unmeasured",
        "evaluations",
        ["key", "generation"],
        ["state", "segment_key"],
        "state <> 'SUCCEEDED'",
    ),
    (
        "ix_grid_evaluations_closed",
        "grid_evaluations",
        ["grid_id", "evaluation_key"],
        ["closed_as"],
        "closed_as IS NOT NULL",
    ),
    ("ix_cells_grid_id_id", "cells", ["grid_id", "id"], [], None),
    ("ix_observations_y_id", "observations", ["y", "id"], [], None),
    ("ix_observations_series_id_y_id", "observations", ["series_id", "y", "id"], [], None),
)

GRIDS = """
CREATE OR REPLACE VIEW research.grids AS
SELECT
    g.id AS grid_id, g.name, g.protocol, g.holdout, g.document, g.tokens_train, g.tokens_independent, g.flops,
    g.gpu_hours, g.created_at, {counts}, g.paused_at, g.cancelled_at
FROM grids g
{source}
"""

COUNTS_BEFORE = """c.total AS cells, c.measured AS cells_measured, c.running AS cells_running,
    c.pending AS cells_pending, c.failed AS cells_failed, c.cancelled AS cells_cancelled"""
SOURCE_BEFORE = """CROSS JOIN LATERAL (
    SELECT
        count(*) AS total,
        count(*) FILTER (WHERE v.state = 'MEASURED') AS measured,
        count(*) FILTER (WHERE v.state = 'RUNNING') AS running,
        count(*) FILTER (WHERE v.state = 'PENDING') AS pending,
        count(*) FILTER (WHERE v.state = 'FAILED') AS failed,
        count(*) FILTER (WHERE v.state = 'CANCELLED') AS cancelled
    FROM research.cells v WHERE v.grid_id = g.id
) c"""

# Only what is not measured is looked at, whatever has been measured besides; a cell without any of it is measured. An
# evaluation is not measured for a grid while its newest generation has no result, or where the grid's claim was closed.
COUNTS = """c.total AS cells, c.total - coalesce(u.cells, 0) AS cells_measured,
    coalesce(u.running, 0) AS cells_running, coalesce(u.pending, 0) AS cells_pending,
    coalesce(u.failed, 0) AS cells_failed, coalesce(u.cancelled, 0) AS cells_cancelled"""
SOURCE = """CROSS JOIN LATERAL (SELECT count(*) AS total FROM cells WHERE grid_id = g.id) c
LEFT JOIN (
    SELECT
        grid_id,
        count(*) AS cells,
        count(*) FILTER (WHERE state = 'RUNNING') AS running,
        count(*) FILTER (WHERE state = 'PENDING') AS pending,
        count(*) FILTER (WHERE state = 'FAILED') AS failed,
        count(*) FILTER (WHERE state = 'CANCELLED') AS cancelled
    FROM (
        SELECT
            grid_id,
            CASE
                WHEN bool_or(state = 'RUNNING') THEN 'RUNNING'
                WHEN bool_or(state = 'PENDING') THEN 'PENDING'
                WHEN bool_or(state = 'FAILED') THEN 'FAILED'
                ELSE 'CANCELLED'
            END AS state
        FROM (
            SELECT
                c.grid_id, ce.cell_id,
                CASE
                    WHEN e.state IN ('FAILED', 'CANCELLED', 'RUNNING') THEN e.state
                    WHEN EXISTS (
                        SELECT FROM segments s WHERE s.key = e.segment_key AND s.state = 'RUNNING'
                    ) THEN 'RUNNING'
                    ELSE 'PENDING'
                END AS state
            FROM evaluations e
            JOIN cell_evaluations ce ON ce.evaluation_key = e.key
            JOIN cells c ON c.id = ce.cell_id
            WHERE e.state <> 'SUCCEEDED'
                AND NOT EXISTS (
                    SELECT FROM evaluations later
                    WHERE later.key = e.key AND later.generation > e.generation AND later.generation > 1
                )
                AND NOT EXISTS (
                    SELECT FROM grid_evaluations ge
                    WHERE ge.grid_id = c.grid_id AND ge.evaluation_key = e.key AND ge.closed_as IS NOT NULL
                )
            UNION ALL
            SELECT ge.grid_id, ce.cell_id, ge.closed_as
            FROM grid_evaluations ge
            JOIN cell_evaluations ce ON ce.evaluation_key = ge.evaluation_key
            JOIN cells c ON c.id = ce.cell_id AND c.grid_id = ge.grid_id
            WHERE ge.closed_as IS NOT NULL
        ) unmeasured
        GROUP BY grid_id, cell_id
    ) cell
    GROUP BY grid_id
) u ON u.grid_id = g.id"""


def upgrade() -> None:
    for name, table, columns, included, rows in INDEXES:
        op.create_index(
            name,
            table,
            columns,
            postgresql_include=included or None,
            postgresql_where=None if rows is None else sa.text(rows),
        )
    op.execute(GRIDS.format(counts=COUNTS, source=SOURCE))


def downgrade() -> None:
    op.execute(GRIDS.format(counts=COUNTS_BEFORE, source=SOURCE_BEFORE))
    for name, table, *_ in reversed(INDEXES):
        op.drop_index(name, table_name=table)
