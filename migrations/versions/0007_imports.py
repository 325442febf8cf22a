"""Imported observations: known by their sizes and seeds, in series that say what they were imported as.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

#: Column of `research.series` -> what it means, and what it meant before.
MEANINGS = {
    "family": (
        "Identity of the recipe without its scale; of imported series the name that the import gave it.",
        "Identity of the recipe without its scale.",
    ),
    "evaluator_id": (
        "The evaluator; of imported series it stands for the name that the import gave.",
        "The evaluator.",
    ),
}


def upgrade() -> None:
    op.create_index(
        "uq_observations_imported",
        "observations",
        [
            "series_id",
            "n_params",
            sa.text("coalesce(short_tokens, 0)"),
            "long_tokens",
            "short_seed",
            "long_seed",
        ],
        unique=True,
        postgresql_where=sa.text("source = 'imported'"),
    )
    _explain({column: now for column, (now, _) in MEANINGS.items()})


def downgrade() -> None:
    _explain({column: before for column, (_, before) in MEANINGS.items()})
    op.drop_index("uq_observations_imported", table_name="observations")


def _explain(meanings: dict[str, str]) -> None:
    for column, meaning in meanings.items():
        op.execute(f"COMMENT ON COLUMN research.series.{column} IS '{meaning}'")
