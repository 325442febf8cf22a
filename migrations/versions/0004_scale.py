"""Models from elsewhere, whose D_s may be unknown; follow-up stages and their merged starts; how segments are run.

Revision ID: 0004
Revises: 0003
"""

import re

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

WITH_SHORT_TOKENS = ("cells", "evaluations", "observations")
KINDS = ("short_trunk", "short_decay", "long_constant", "long_linear_decay")
UNKNOWN = "D_s, tokens of the short-context stage; NULL where nobody knows them."
#: Views that show D_s of rows where it may be unknown.
VIEWS_WITH_SHORT_TOKENS = ("cell_evaluations", "cells", "longppl", "observations", "predictions")
KIND = "short_trunk, short_decay, long_constant, long_linear_decay or follow_up."
STAGE_TOKENS = "Tokens of the stage consumed: D_s of a short segment, D_l of a long one, its own of a follow-up."
FOLLOW_UP = "The stage that went on from D_l, by its name in the grid; NULL for the long stage itself."


def upgrade() -> None:
    for table in WITH_SHORT_TOKENS:
        op.alter_column(table, "short_tokens", existing_type=sa.BigInteger(), nullable=True)
    op.add_column("evaluations", sa.Column("follow_up", sa.Text(), nullable=True))
    op.add_column(
        "segments",
        sa.Column("execution", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
    )
    _set_kinds(*KINDS, "follow_up")
    op.create_table(
        "segment_sources",
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("source_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("step > 0", name=op.f("ck_segment_sources_step")),
        sa.PrimaryKeyConstraint("segment_key", "source_key", "step", name=op.f("pk_segment_sources")),
    )
    op.create_index(op.f("ix_segment_sources_source_key_step"), "segment_sources", ["source_key", "step"])
    for view in VIEWS_WITH_SHORT_TOKENS:
        op.execute(f"COMMENT ON COLUMN research.{view}.short_tokens IS '{UNKNOWN}'")
    op.execute(f"COMMENT ON COLUMN research.checkpoints.segment_kind IS '{KIND}'")
    op.execute(f"COMMENT ON COLUMN research.checkpoints.stage_tokens IS '{STAGE_TOKENS}'")
    _rewrite_longppl(r"\s+FROM evaluations e", ", e.follow_up FROM evaluations e")
    op.execute(f"COMMENT ON COLUMN research.longppl.follow_up IS '{FOLLOW_UP}'")


def downgrade() -> None:
    _rewrite_longppl(r",\s+follow_up\s+FROM", " FROM")  # its comments are gone with it
    op.drop_table("segment_sources")
    _set_kinds(*KINDS)
    op.drop_column("segments", "execution")
    op.drop_column("evaluations", "follow_up")
    for table in WITH_SHORT_TOKENS:
        op.alter_column(table, "short_tokens", existing_type=sa.BigInteger(), nullable=False)


def _rewrite_longppl(pattern: str, replacement: str) -> None:
    """Makes the view anew from its own definition, so that all other columns stay what they are, word for word."""
    connection = op.get_bind()
    definition = connection.execute(sa.text("SELECT pg_get_viewdef(CAST('research.longppl' AS regclass))")).scalar_one()
    changed, count = re.subn(pattern, replacement, definition)
    assert count == 1, definition
    if "follow_up" not in changed:
        op.execute("DROP VIEW research.longppl")
    op.execute(f"CREATE OR REPLACE VIEW research.longppl AS {changed}".replace(":", "\\:"))


def _set_kinds(*kinds: str) -> None:
    op.drop_constraint(op.f("ck_segments_kind"), "segments", type_="check")
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    op.create_check_constraint(op.f("ck_segments_kind"), "segments", f"kind IN ({listed})")
