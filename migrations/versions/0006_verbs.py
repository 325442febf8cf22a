"""Grids can be paused and cancelled: when they were, and how the claims of cancelled ones ended.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

CLAIMS = ("grid_segments", "grid_evaluations")
#: What an evaluation is for a cell: a closed claim stays as it ended, whatever other grids make of the evaluation.
STATE, REASON, VALUE, CLAIM = (
    """CASE
        WHEN ge.closed_as IS NOT NULL THEN ge.closed_as
        WHEN e.state = 'SUCCEEDED' THEN 'MEASURED'""",
    "CASE WHEN ge.closed_as = 'CANCELLED' THEN 'the grid was cancelled' ELSE e.reason END",
    "CASE WHEN ge.closed_as IS NULL THEN e.log_longppl END",
    "LEFT JOIN grid_evaluations ge ON ge.grid_id = c.grid_id AND ge.evaluation_key = ce.evaluation_key\n    ",
)
STATE_BEFORE, REASON_BEFORE, VALUE_BEFORE, CLAIM_BEFORE = (
    "CASE\n        WHEN e.state = 'SUCCEEDED' THEN 'MEASURED'",
    "e.reason",
    "e.log_longppl",
    "",
)
CELL_EVALUATIONS = """
CREATE OR REPLACE VIEW research.cell_evaluations AS
SELECT
    c.grid_id AS grid_id,
    c.id AS cell_id,
    c.scale AS scale,
    c.n_params AS n_params,
    c.short_tokens AS short_tokens,
    c.long_tokens AS long_tokens,
    c.short_seed AS short_seed,
    c.long_seed AS long_seed,
    ce.series_id AS series_id,
    s.rule AS rule,
    ce.evaluation_key AS evaluation_key,
    {state}
        WHEN e.state IN ('FAILED', 'CANCELLED', 'RUNNING') THEN e.state
        WHEN EXISTS (
            SELECT FROM segments g WHERE g.key = e.segment_key AND g.state = 'RUNNING'
        ) THEN 'RUNNING'
        ELSE 'PENDING'
    END AS state,
    {reason} AS reason,
    {value} AS log_longppl
FROM cell_evaluations ce
    JOIN cells c ON c.id = ce.cell_id
    JOIN series s ON s.id = ce.series_id
    {claim}LEFT JOIN LATERAL (
        SELECT state, reason, log_longppl, segment_key FROM evaluations
        WHERE key = ce.evaluation_key ORDER BY generation DESC LIMIT 1
    ) e ON true
"""
#: At the end of `research.grids`, as Postgres gives them back.
TIMES = ",\n    g.paused_at,\n    g.cancelled_at"
END = "\n   FROM (grids g"
MEANINGS = {
    "paused_at": "Since when nothing begins that only paused grids ask for; NULL where it is not paused.",
    "cancelled_at": "When it was cancelled; NULL where it was not.",
}


def upgrade() -> None:
    for column in MEANINGS:
        op.add_column("grids", sa.Column(column, sa.DateTime(timezone=True), nullable=True))
    op.create_check_constraint(
        op.f("ck_grids_paused_or_cancelled"), "grids", "paused_at IS NULL OR cancelled_at IS NULL"
    )
    op.create_index("ix_grids_paused", "grids", ["paused_at"], postgresql_where=sa.text("paused_at IS NOT NULL"))
    for table in CLAIMS:
        op.add_column(table, sa.Column("closed_as", sa.Text(), nullable=True))
        op.create_check_constraint(op.f(f"ck_{table}_closed_as"), table, "closed_as IN ('FAILED', 'CANCELLED')")
    op.execute(CELL_EVALUATIONS.format(state=STATE, reason=REASON, value=VALUE, claim=CLAIM))
    definition = _definition_of_grids()
    assert definition.count(END) == 1, definition
    op.execute(f"CREATE OR REPLACE VIEW research.grids AS {definition.replace(END, TIMES + END)}".replace(":", "\\:"))
    for column, meaning in MEANINGS.items():
        op.execute(f"COMMENT ON COLUMN research.grids.{column} IS '{meaning}'")


def downgrade() -> None:
    definition, comments = _definition_of_grids(), _comments_of_grids()
    assert definition.count(TIMES) == 1, definition
    op.execute("DROP VIEW research.grids")  # a view loses columns only with itself
    op.execute(f"CREATE VIEW research.grids AS {definition.replace(TIMES, '')}".replace(":", "\\:"))
    for subject, comment in comments:
        op.execute(f"COMMENT ON {subject} IS " + "'" + comment.replace("'", "''") + "'")
    op.execute(
        CELL_EVALUATIONS.format(state=STATE_BEFORE, reason=REASON_BEFORE, value=VALUE_BEFORE, claim=CLAIM_BEFORE)
    )
    for table in CLAIMS:
        op.drop_constraint(op.f(f"ck_{table}_closed_as"), table, type_="check")
        op.drop_column(table, "closed_as")
    op.drop_index("ix_grids_paused", table_name="grids")
    op.drop_constraint(op.f("ck_grids_paused_or_cancelled"), "grids", type_="check")
    for column in MEANINGS:
        op.drop_column("grids", column)


def _definition_of_grids() -> str:
    found = op.get_bind().execute(sa.text("SELECT pg_get_viewdef(CAST('research.grids' AS regclass))"))
    definition: str = found.scalar_one()
    return definition


def _comments_of_grids() -> list[tuple[str, str]]:
    """What stays of the view, and what is said about it: its comments would go with it."""
    view = "CAST('research.grids' AS regclass)"
    found = op.get_bind().execute(
        sa.text(
            f"SELECT 'VIEW research.grids', obj_description({view}) UNION ALL"  # noqa: S608 - a constant
            " SELECT 'COLUMN research.grids.' || attname, col_description(attrelid, attnum) FROM pg_attribute"
            f" WHERE attrelid = {view} AND attnum > 0 AND attname NOT IN ('paused_at', 'cancelled_at')"
        )
    )
    return [(subject, comment) for subject, comment in found]
