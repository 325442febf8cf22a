"""How training went, point by point, and what probes found.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

FINITE = "{} NOT IN ('NaN', 'Infinity', '-Infinity')"
TRAINING = """
CREATE VIEW research.training AS
SELECT
    p.segment_key, s.scale, s.kind AS segment_kind, p.step, p.step * s.tokens_per_step AS segment_tokens,
    p.loss, p.gradient_norm, p.learning_rate, p.tokens_per_s, p.mfu
FROM training_points p
JOIN LATERAL (
    SELECT scale, kind, tokens_per_step FROM segments WHERE key = p.segment_key ORDER BY generation DESC LIMIT 1
) s ON true
"""
METRICS = """
CREATE VIEW research.metrics AS
SELECT
    e.key AS evaluation_key, e.segment_key, e.step, e.rule ->> 'name' AS rule, e.follow_up, e.evaluator_id,
    e.scale, e.n_params, e.short_tokens, e.long_tokens, e.short_seed, e.long_seed,
    m.name AS metric, m.value, m.count, m.length, m.depth, m.label
FROM metrics m
JOIN evaluations e ON e.id = m.evaluation_id
"""
COMMENTS = {
    "training": (
        "How training went, at evenly spaced steps; a long segment keeps fewer of its early ones.",
        {
            "segment_key": "The segment.",
            "scale": "Name of the model size.",
            "segment_kind": "short_trunk, short_decay, long_constant, long_linear_decay or follow_up.",
            "step": "The step of that segment.",
            "segment_tokens": "Tokens of that segment up to the step.",
            "loss": "Loss of that step, in nats per token.",
            "gradient_norm": "Norm of its gradient before clipping.",
            "learning_rate": "Its learning rate.",
            "tokens_per_s": "Speed since the point before.",
            "mfu": "Share of the device's peak that the model's own operations reach; NULL without a stated peak.",
        },
    ),
    "metrics": (
        "One row per number of a probe: loss by position, pass key, needle, retrieval heads, RULER.",
        {
            "evaluation_key": "Identity of the measurement: a snapshot and a set of probes.",
            "segment_key": "The segment whose checkpoints were evaluated.",
            "step": "The step of that segment.",
            "rule": "How checkpoints became the model evaluated.",
            "follow_up": "The stage that went on from D_l, by its name in the grid; NULL for the long stage itself.",
            "evaluator_id": "The set of probes, with documents and seed.",
            "scale": "Name of the model size.",
            "n_params": "N, non-embedding parameters.",
            "short_tokens": "D_s, tokens of the short-context stage; NULL where nobody knows them.",
            "long_tokens": "D_l, tokens of the long-context stage.",
            "short_seed": "Seed of initialisation and of the order of the short stage.",
            "long_seed": "Seed of the order of the long stage.",
            "metric": "What was measured.",
            "value": "The number.",
            "count": "Samples or tokens behind it.",
            "length": "Tokens of context.",
            "depth": "The place looked at, as a share of the context in [0, 1].",
            "label": "What tells numbers of one metric apart: a task, a head.",
        },
    ),
}


#: Probes measure no perplexity: the view leaves out evaluations that predicted nothing.
MEASURED = "(state = 'SUCCEEDED'::text)"
MEASURED_WITH_LOSSES = "((state = 'SUCCEEDED'::text) AND (all_count > 0))"
END = "\n   FROM evaluations e"
RULE_COLUMNS = (
    ",\n    (rule ->> 'decay')::double precision AS rule_decay,"
    "\n    (rule ->> 'density')::double precision AS rule_density"
)
#: As Postgres gives them back.
RULE_COLUMNS_AS_KEPT = (
    ",\n    ((rule ->> 'decay'::text))::double precision AS rule_decay,"
    "\n    ((rule ->> 'density'::text))::double precision AS rule_density"
)
RULE_MEANINGS = {
    "rule": "How checkpoints became the model evaluated: raw, last_m, one_sqrt, ema, dare or ties.",
    "rule_m": "How many checkpoints were merged; 0 is all from the beginning of the segment.",
    "rule_decay": "Base of the weights of ema for one spacing.",
    "rule_density": "Share of coordinates that dare and ties keep.",
}


def upgrade() -> None:
    op.create_table(
        "training_points",
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("gradient_norm", sa.Double(), nullable=False),
        sa.Column("learning_rate", sa.Double(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("mfu", sa.Double(), nullable=True),
        sa.CheckConstraint("step > 0", name=op.f("ck_training_points_step")),
        sa.CheckConstraint(FINITE.format("loss"), name=op.f("ck_training_points_loss")),
        sa.PrimaryKeyConstraint("segment_key", "step", name=op.f("pk_training_points")),
    )
    op.create_table(
        "metrics",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("evaluation_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=True),
        sa.Column("depth", sa.Double(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.CheckConstraint("count > 0", name=op.f("ck_metrics_count")),
        sa.CheckConstraint(FINITE.format("value"), name=op.f("ck_metrics_value")),
        sa.CheckConstraint("length > 0 AND depth BETWEEN 0 AND 1", name=op.f("ck_metrics_place")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluations.id"], name=op.f("fk_metrics_evaluation_id_evaluations")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metrics")),
    )
    op.create_index(op.f("ix_metrics_evaluation_id"), "metrics", ["evaluation_id"])
    for view, statement in (("training", TRAINING), ("metrics", METRICS)):
        op.execute(statement)
        about, columns = COMMENTS[view]
        op.execute(f"COMMENT ON VIEW research.{view} IS {_quoted(about)}")
        for column, meaning in columns.items():
            op.execute(f"COMMENT ON COLUMN research.{view}.{column} IS {_quoted(meaning)}")

    _rewrite_longppl((MEASURED, MEASURED_WITH_LOSSES), (END, RULE_COLUMNS + END))
    for column, meaning in RULE_MEANINGS.items():
        op.execute(f"COMMENT ON COLUMN research.longppl.{column} IS {_quoted(meaning)}")


def downgrade() -> None:
    _rewrite_longppl((MEASURED_WITH_LOSSES, MEASURED), (RULE_COLUMNS_AS_KEPT, ""), anew=True)
    op.execute("DROP VIEW research.metrics")
    op.execute("DROP VIEW research.training")
    op.drop_table("metrics")
    op.drop_table("training_points")


def _quoted(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"


def _rewrite_longppl(*changes: tuple[str, str], anew: bool = False) -> None:
    """Makes the view from its own definition, so that all other columns stay what they are, word for word."""
    found = op.get_bind().execute(sa.text("SELECT pg_get_viewdef(CAST('research.longppl' AS regclass))"))
    definition = found.scalar_one()
    for old, new in changes:
        assert definition.count(old) == 1, definition
        definition = definition.replace(old, new)
    if anew:  # a view loses columns only with itself
        op.execute("DROP VIEW research.longppl")
    op.execute(f"CREATE OR REPLACE VIEW research.longppl AS {definition}".replace(":", "\\:"))
