"""The tables, and the triggers that keep closed rows as they are.

Revision ID: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# What has ended is a record: a later attempt opens a new generation, a later fit is a new row.
REFUSE_CLOSED = """
CREATE FUNCTION refuse_change_of_closed_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% % is %: a row that has ended never changes', TG_TABLE_NAME, OLD.id, OLD.state
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
END $$
"""

# A fit can be run again from its observations only while they stay what they were.
REFUSE_ANY = """
CREATE FUNCTION refuse_change_of_observation() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'observations % is for ever: fits name it (% refused)', OLD.id, lower(TG_OP)
        USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
END $$
"""

# The parts of a fit (parameters, observations, draws) close with it.
REFUSE_PART_OF_CLOSED_FIT = """
CREATE FUNCTION refuse_change_of_closed_fit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    part record := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    closed_state text;
BEGIN
    SELECT state INTO closed_state FROM fits WHERE id = part.fit_id AND state IN ('SUCCEEDED', 'FAILED');
    IF FOUND THEN
        RAISE EXCEPTION '% of fit % cannot change: the fit is %', TG_TABLE_NAME, part.fit_id, closed_state
            USING ERRCODE = 'restrict_violation', TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
    END IF;
    RETURN part;
END $$
"""

TABLES_THAT_CLOSE = ("segments", "evaluations", "fits")
PARTS_OF_A_FIT = ("fit_parameters", "fit_observations", "fit_draws")

# Children before parents.
TABLES = [
    "fit_parameters",
    "fit_observations",
    "fit_draws",
    "checkpoints",
    "observations",
    "fits",
    "cell_evaluations",
    "attempts",
    "series",
    "grid_segments",
    "grid_evaluations",
    "events",
    "evaluations",
    "cells",
    "segments",
    "segment_saves",
    "schedulers",
    "idempotency_keys",
    "grids",
    "evaluators",
    "evaluation_sources",
]


def upgrade() -> None:
    op.create_table(
        "evaluation_sources",
        sa.Column("evaluation_key", sa.Text(), nullable=False),
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("evaluation_key", "segment_key", "step", name=op.f("pk_evaluation_sources")),
    )
    op.create_index(op.f("ix_evaluation_sources_segment_key_step"), "evaluation_sources", ["segment_key", "step"])
    op.create_table(
        "evaluators",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluators")),
    )
    op.create_table(
        "grids",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("document", postgresql.JSONB(), nullable=False),
        sa.Column("document_hash", sa.Text(), nullable=False),
        sa.Column("tokens_train", sa.BigInteger(), nullable=False),
        sa.Column("tokens_independent", sa.BigInteger(), nullable=False),
        sa.Column("flops", sa.Double(), nullable=False),
        sa.Column("gpu_hours", sa.Double(), nullable=False),
        sa.Column("holdout", sa.Text(), nullable=True),
        sa.Column("bootstrap", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("protocol IN ('constant', 'linear_decay')", name=op.f("ck_grids_protocol")),
        sa.CheckConstraint("tokens_train >= 0 AND tokens_independent >= 0", name=op.f("ck_grids_tokens")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grids")),
    )
    op.create_index(op.f("ix_grids_created_at_id"), "grids", ["created_at", "id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("response", postgresql.JSONB(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "schedulers",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("leading", sa.Boolean(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schedulers")),
    )
    op.create_table(
        "segment_saves",
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("step > 0", name=op.f("ck_segment_saves_step")),
        sa.PrimaryKeyConstraint("segment_key", "step", name=op.f("pk_segment_saves")),
    )
    op.create_table(
        "segments",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("scale", sa.Text(), nullable=False),
        sa.Column("parent_key", sa.Text(), nullable=True),
        sa.Column("parent_step", sa.BigInteger(), nullable=True),
        sa.Column("spec", postgresql.JSONB(), nullable=False),
        sa.Column("tokens_per_step", sa.BigInteger(), nullable=False),
        sa.Column("target_step", sa.BigInteger(), nullable=False),
        sa.Column("priority", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("state", sa.Text(), server_default="PENDING", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("user_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("infrastructure_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))", name=op.f("ck_segments_ended")
        ),
        sa.CheckConstraint(
            "kind IN ('short_trunk', 'short_decay', 'long_constant', 'long_linear_decay')",
            name=op.f("ck_segments_kind"),
        ),
        sa.CheckConstraint(
            "state IN ('PENDING', 'READY', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')",
            name=op.f("ck_segments_state"),
        ),
        sa.CheckConstraint("(parent_key IS NULL) = (parent_step IS NULL)", name=op.f("ck_segments_parent")),
        sa.CheckConstraint("target_step > 0 AND tokens_per_step > 0", name=op.f("ck_segments_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_segments")),
        sa.UniqueConstraint("key", "generation", name=op.f("uq_segments_key_generation")),
    )
    op.create_index(
        "ix_segments_claimable",
        "segments",
        ["state", sa.literal_column("priority DESC"), "id"],
        postgresql_where=sa.text("state IN ('PENDING', 'READY', 'RUNNING')"),
    )
    op.create_index(op.f("ix_segments_parent_key_parent_step"), "segments", ["parent_key", "parent_step"])
    op.create_index(
        "uq_segments_open",
        "segments",
        ["key"],
        unique=True,
        postgresql_where=sa.text("state IN ('PENDING', 'READY', 'RUNNING')"),
    )
    op.create_table(
        "cells",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("grid_id", sa.Uuid(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("scale", sa.Text(), nullable=False),
        sa.Column("n_params", sa.BigInteger(), nullable=False),
        sa.Column("short_tokens", sa.BigInteger(), nullable=False),
        sa.Column("long_tokens", sa.BigInteger(), nullable=False),
        sa.Column("short_seed", sa.BigInteger(), nullable=False),
        sa.Column("long_seed", sa.BigInteger(), nullable=False),
        sa.Column("plan_status", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "plan_status IN ('reused', 'in_flight', 'extended', 'new')", name=op.f("ck_cells_plan_status")
        ),
        sa.CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens > 0", name=op.f("ck_cells_sizes")),
        sa.ForeignKeyConstraint(["grid_id"], ["grids.id"], name=op.f("fk_cells_grid_id_grids")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cells")),
        sa.UniqueConstraint("grid_id", "key", name=op.f("uq_cells_grid_id_key")),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=False),
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("rule", postgresql.JSONB(), nullable=False),
        sa.Column("evaluator_id", sa.Text(), nullable=False),
        sa.Column("scale", sa.Text(), nullable=False),
        sa.Column("n_params", sa.BigInteger(), nullable=False),
        sa.Column("short_tokens", sa.BigInteger(), nullable=False),
        sa.Column("long_tokens", sa.BigInteger(), nullable=False),
        sa.Column("short_seed", sa.BigInteger(), nullable=False),
        sa.Column("long_seed", sa.BigInteger(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="PENDING", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("user_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("infrastructure_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("log_longppl", sa.Double(), nullable=True),
        sa.Column("log_longppl_se", sa.Double(), nullable=True),
        sa.Column("log_shortppl", sa.Double(), nullable=True),
        sa.Column("log_shortppl_se", sa.Double(), nullable=True),
        sa.Column("log_ppl", sa.Double(), nullable=True),
        sa.Column("log_ppl_se", sa.Double(), nullable=True),
        sa.Column("key_gap", sa.Double(), nullable=True),
        sa.Column("key_count", sa.BigInteger(), nullable=True),
        sa.Column("short_count", sa.BigInteger(), nullable=True),
        sa.Column("all_count", sa.BigInteger(), nullable=True),
        sa.Column("documents", postgresql.JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED', 'CANCELLED'))",
            name=op.f("ck_evaluations_ended"),
        ),
        sa.CheckConstraint(
            "log_longppl NOT IN ('NaN', 'Infinity', '-Infinity') AND log_shortppl NOT IN ('NaN', 'Infinity', '-Infinity') AND log_ppl NOT IN ('NaN', 'Infinity', '-Infinity') AND key_gap NOT IN ('NaN', 'Infinity', '-Infinity')",
            name=op.f("ck_evaluations_numbers"),
        ),
        sa.CheckConstraint(
            "log_longppl_se NOT IN ('NaN', 'Infinity', '-Infinity') AND log_shortppl_se NOT IN ('NaN', 'Infinity', '-Infinity') AND log_ppl_se NOT IN ('NaN', 'Infinity', '-Infinity')",
            name=op.f("ck_evaluations_standard_errors"),
        ),
        sa.CheckConstraint(
            "state <> 'SUCCEEDED' OR (all_count IS NOT NULL AND (log_longppl IS NOT NULL OR reason IS NOT NULL))",
            name=op.f("ck_evaluations_measured"),
        ),
        sa.CheckConstraint(
            "state IN ('PENDING', 'READY', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')",
            name=op.f("ck_evaluations_state"),
        ),
        sa.CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens >= 0", name=op.f("ck_evaluations_sizes")),
        sa.ForeignKeyConstraint(
            ["evaluator_id"], ["evaluators.id"], name=op.f("fk_evaluations_evaluator_id_evaluators")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("key", "generation", name=op.f("uq_evaluations_key_generation")),
    )
    op.create_index(
        "ix_evaluations_claimable",
        "evaluations",
        ["state", "id"],
        postgresql_where=sa.text("state IN ('PENDING', 'READY', 'RUNNING')"),
    )
    op.create_index(op.f("ix_evaluations_evaluator_id"), "evaluations", ["evaluator_id"])
    op.create_index(
        "ix_evaluations_given_up", "evaluations", ["key"], postgresql_where=sa.text("state IN ('FAILED', 'CANCELLED')")
    )
    op.create_index(op.f("ix_evaluations_segment_key_step"), "evaluations", ["segment_key", "step"])
    op.create_index(
        "uq_evaluations_open",
        "evaluations",
        ["key"],
        unique=True,
        postgresql_where=sa.text("state IN ('PENDING', 'READY', 'RUNNING')"),
    )
    op.create_index(
        "uq_evaluations_succeeded", "evaluations", ["key"], unique=True, postgresql_where=sa.text("state = 'SUCCEEDED'")
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("grid_id", sa.Uuid(), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), server_default=sa.text("'{}'::jsonb"), nullable=False),
        sa.ForeignKeyConstraint(["grid_id"], ["grids.id"], name=op.f("fk_events_grid_id_grids")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_grid_id"), "events", ["grid_id"])
    op.create_table(
        "grid_evaluations",
        sa.Column("grid_id", sa.Uuid(), nullable=False),
        sa.Column("evaluation_key", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["grid_id"], ["grids.id"], name=op.f("fk_grid_evaluations_grid_id_grids")),
        sa.PrimaryKeyConstraint("grid_id", "evaluation_key", name=op.f("pk_grid_evaluations")),
    )
    op.create_index(op.f("ix_grid_evaluations_evaluation_key"), "grid_evaluations", ["evaluation_key"])
    op.create_table(
        "grid_segments",
        sa.Column("grid_id", sa.Uuid(), nullable=False),
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("target_step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["grid_id"], ["grids.id"], name=op.f("fk_grid_segments_grid_id_grids")),
        sa.PrimaryKeyConstraint("grid_id", "segment_key", name=op.f("pk_grid_segments")),
    )
    op.create_index(op.f("ix_grid_segments_segment_key"), "grid_segments", ["segment_key"])
    op.create_table(
        "series",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("evaluator_id", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["evaluator_id"], ["evaluators.id"], name=op.f("fk_series_evaluator_id_evaluators")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_series")),
    )
    op.create_index(op.f("ix_series_evaluator_id"), "series", ["evaluator_id"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("segment_id", sa.BigInteger(), nullable=True),
        sa.Column("evaluation_id", sa.BigInteger(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("token", sa.Uuid(), nullable=False),
        sa.Column("scheduler_id", sa.Uuid(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="RUNNING", nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("start_step", sa.BigInteger(), nullable=True),
        sa.Column("progress_step", sa.BigInteger(), nullable=True),
        sa.Column("target_step", sa.BigInteger(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(ended_at IS NULL) = (state = 'RUNNING')", name=op.f("ck_attempts_ended")),
        sa.CheckConstraint("failure_kind IN ('user', 'infrastructure')", name=op.f("ck_attempts_failure_kind")),
        sa.CheckConstraint(
            "state IN ('RUNNING', 'SUCCEEDED', 'FAILED', 'LOST', 'STOPPED')", name=op.f("ck_attempts_state")
        ),
        sa.CheckConstraint("(segment_id IS NULL) <> (evaluation_id IS NULL)", name=op.f("ck_attempts_one_subject")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluations.id"], name=op.f("fk_attempts_evaluation_id_evaluations")
        ),
        sa.ForeignKeyConstraint(["scheduler_id"], ["schedulers.id"], name=op.f("fk_attempts_scheduler_id_schedulers")),
        sa.ForeignKeyConstraint(["segment_id"], ["segments.id"], name=op.f("fk_attempts_segment_id_segments")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("token", name=op.f("uq_attempts_token")),
    )
    op.create_index(op.f("ix_attempts_evaluation_id_number"), "attempts", ["evaluation_id", "number"], unique=True)
    op.create_index(op.f("ix_attempts_scheduler_id"), "attempts", ["scheduler_id"])
    op.create_index(op.f("ix_attempts_segment_id_number"), "attempts", ["segment_id", "number"], unique=True)
    op.create_index(
        "uq_attempts_live_evaluation",
        "attempts",
        ["evaluation_id"],
        unique=True,
        postgresql_where=sa.text("state = 'RUNNING'"),
    )
    op.create_index(
        "uq_attempts_live_segment",
        "attempts",
        ["segment_id"],
        unique=True,
        postgresql_where=sa.text("state = 'RUNNING'"),
    )
    op.create_table(
        "cell_evaluations",
        sa.Column("cell_id", sa.BigInteger(), nullable=False),
        sa.Column("evaluation_key", sa.Text(), nullable=False),
        sa.Column("series_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cells.id"], name=op.f("fk_cell_evaluations_cell_id_cells")),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name=op.f("fk_cell_evaluations_series_id_series")),
        sa.PrimaryKeyConstraint("cell_id", "evaluation_key", name=op.f("pk_cell_evaluations")),
    )
    op.create_index(op.f("ix_cell_evaluations_evaluation_key"), "cell_evaluations", ["evaluation_key"])
    op.create_index(op.f("ix_cell_evaluations_series_id"), "cell_evaluations", ["series_id"])
    op.create_table(
        "fits",
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.Column("series_id", sa.Text(), nullable=False),
        sa.Column("law", sa.Text(), nullable=False),
        sa.Column("holdout", sa.Text(), nullable=True),
        sa.Column("bootstrap", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="PENDING", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("last_observation_id", sa.BigInteger(), nullable=False),
        sa.Column("objective", sa.Double(), nullable=True),
        sa.Column("gradient_norm", sa.Double(), nullable=True),
        sa.Column("huber_delta", sa.Double(), nullable=True),
        sa.Column("level", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("n_draws_ok", sa.Integer(), nullable=True),
        sa.Column("jacobian_rank", sa.Integer(), nullable=True),
        sa.Column("n_observations", sa.Integer(), nullable=True),
        sa.Column("n_clusters", sa.Integer(), nullable=True),
        sa.Column("residual_std", sa.Double(), nullable=True),
        sa.Column("r2", sa.Double(), nullable=True),
        sa.Column("mape_log", sa.Double(), nullable=True),
        sa.Column("holdout_n", sa.Integer(), nullable=True),
        sa.Column("holdout_r2", sa.Double(), nullable=True),
        sa.Column("holdout_mape_log", sa.Double(), nullable=True),
        sa.Column("holdout_mape_ppl", sa.Double(), nullable=True),
        sa.Column("holdout_bias", sa.Double(), nullable=True),
        sa.Column("n_params_min", sa.Double(), nullable=True),
        sa.Column("n_params_max", sa.Double(), nullable=True),
        sa.Column("short_tokens_min", sa.Double(), nullable=True),
        sa.Column("short_tokens_max", sa.Double(), nullable=True),
        sa.Column("long_tokens_min", sa.Double(), nullable=True),
        sa.Column("long_tokens_max", sa.Double(), nullable=True),
        sa.Column("warnings", postgresql.JSONB(), nullable=True),
        sa.Column("explanation", postgresql.JSONB(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(ended_at IS NOT NULL) = (state IN ('SUCCEEDED', 'FAILED'))", name=op.f("ck_fits_ended")),
        sa.CheckConstraint(
            "objective NOT IN ('NaN', 'Infinity', '-Infinity') AND residual_std NOT IN ('NaN', 'Infinity', '-Infinity')",
            name=op.f("ck_fits_numbers"),
        ),
        sa.CheckConstraint("state <> 'FAILED' OR reason IS NOT NULL", name=op.f("ck_fits_reason")),
        sa.CheckConstraint(
            "state <> 'SUCCEEDED' OR (status IS NOT NULL AND objective IS NOT NULL)", name=op.f("ck_fits_fitted")
        ),
        sa.CheckConstraint("state IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED')", name=op.f("ck_fits_state")),
        sa.CheckConstraint("bootstrap >= 0", name=op.f("ck_fits_bootstrap")),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name=op.f("fk_fits_series_id_series")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fits")),
    )
    op.create_index(op.f("ix_fits_series_id_created_at_id"), "fits", ["series_id", "created_at", "id"])
    op.create_index(
        "uq_fits_open",
        "fits",
        ["series_id", "law", sa.literal_column("coalesce(holdout, '')")],
        unique=True,
        postgresql_where=sa.text("state IN ('PENDING', 'RUNNING')"),
    )
    op.create_table(
        "observations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("series_id", sa.Text(), nullable=False),
        sa.Column("evaluation_key", sa.Text(), nullable=True),
        sa.Column("scale", sa.Text(), nullable=False),
        sa.Column("n_params", sa.BigInteger(), nullable=False),
        sa.Column("short_tokens", sa.BigInteger(), nullable=False),
        sa.Column("long_tokens", sa.BigInteger(), nullable=False),
        sa.Column("short_seed", sa.BigInteger(), nullable=False),
        sa.Column("long_seed", sa.BigInteger(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("y", sa.Double(), nullable=False),
        sa.Column("y_se", sa.Double(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("source IN ('run', 'imported')", name=op.f("ck_observations_source")),
        sa.CheckConstraint(
            "y NOT IN ('NaN', 'Infinity', '-Infinity') AND y_se NOT IN ('NaN', 'Infinity', '-Infinity')",
            name=op.f("ck_observations_y"),
        ),
        sa.CheckConstraint("n_params > 0 AND short_tokens > 0 AND long_tokens > 0", name=op.f("ck_observations_sizes")),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name=op.f("fk_observations_series_id_series")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_observations")),
        sa.UniqueConstraint("series_id", "evaluation_key", name=op.f("uq_observations_series_id_evaluation_key")),
    )
    op.create_index(op.f("ix_observations_series_id_id"), "observations", ["series_id", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("segment_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("stage_tokens", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("scheduled", sa.Boolean(), nullable=False),
        sa.Column("mean_loss", sa.Double(), nullable=True),
        sa.Column("attempt_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("mean_loss NOT IN ('NaN', 'Infinity', '-Infinity')", name=op.f("ck_checkpoints_mean_loss")),
        sa.CheckConstraint("step > 0 AND stage_tokens > 0 AND size_bytes > 0", name=op.f("ck_checkpoints_positive")),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_checkpoints_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("segment_key", "step", name=op.f("uq_checkpoints_segment_key_step")),
    )
    op.create_index(op.f("ix_checkpoints_attempt_id"), "checkpoints", ["attempt_id"])
    op.create_table(
        "fit_draws",
        sa.Column("fit_id", sa.Uuid(), nullable=False),
        sa.Column("draw", sa.Integer(), nullable=False),
        sa.Column("amplitude_n", sa.Double(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("amplitude_s", sa.Double(), nullable=False),
        sa.Column("beta_s", sa.Double(), nullable=False),
        sa.Column("amplitude_l", sa.Double(), nullable=False),
        sa.Column("beta_l", sa.Double(), nullable=False),
        sa.Column("offset", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["fit_id"], ["fits.id"], name=op.f("fk_fit_draws_fit_id_fits")),
        sa.PrimaryKeyConstraint("fit_id", "draw", name=op.f("pk_fit_draws")),
    )
    op.create_table(
        "fit_observations",
        sa.Column("fit_id", sa.Uuid(), nullable=False),
        sa.Column("observation_id", sa.BigInteger(), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("predicted", sa.Double(), nullable=True),
        sa.Column("low", sa.Double(), nullable=True),
        sa.Column("high", sa.Double(), nullable=True),
        sa.CheckConstraint("role <> 'excluded' OR reason IS NOT NULL", name=op.f("ck_fit_observations_reason")),
        sa.CheckConstraint("role IN ('fitted', 'held_out', 'excluded')", name=op.f("ck_fit_observations_role")),
        sa.ForeignKeyConstraint(["fit_id"], ["fits.id"], name=op.f("fk_fit_observations_fit_id_fits")),
        sa.ForeignKeyConstraint(
            ["observation_id"], ["observations.id"], name=op.f("fk_fit_observations_observation_id_observations")
        ),
        sa.PrimaryKeyConstraint("fit_id", "observation_id", name=op.f("pk_fit_observations")),
    )
    op.create_index(op.f("ix_fit_observations_observation_id"), "fit_observations", ["observation_id"])
    op.create_table(
        "fit_parameters",
        sa.Column("fit_id", sa.Uuid(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("low", sa.Double(), nullable=True),
        sa.Column("high", sa.Double(), nullable=True),
        sa.Column("at_bound", sa.Boolean(), nullable=False),
        sa.Column("identifiable", sa.Boolean(), nullable=False),
        sa.CheckConstraint("value NOT IN ('NaN', 'Infinity', '-Infinity')", name=op.f("ck_fit_parameters_value")),
        sa.ForeignKeyConstraint(["fit_id"], ["fits.id"], name=op.f("fk_fit_parameters_fit_id_fits")),
        sa.PrimaryKeyConstraint("fit_id", "name", name=op.f("pk_fit_parameters")),
        sa.UniqueConstraint("fit_id", "position", name=op.f("uq_fit_parameters_fit_id_position")),
    )
    _create_triggers()


def _create_triggers() -> None:
    op.execute(REFUSE_CLOSED)
    for table in TABLES_THAT_CLOSE:
        op.execute(f"""
            CREATE TRIGGER closed_rows_never_change BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW
            WHEN (OLD.state IN ('SUCCEEDED', 'FAILED', 'CANCELLED')) EXECUTE FUNCTION refuse_change_of_closed_row()
        """)
    op.execute(REFUSE_ANY)
    op.execute("""
        CREATE TRIGGER observations_never_change BEFORE UPDATE OR DELETE ON observations FOR EACH ROW
        EXECUTE FUNCTION refuse_change_of_observation()
    """)
    op.execute(REFUSE_PART_OF_CLOSED_FIT)
    for table in PARTS_OF_A_FIT:
        op.execute(f"""
            CREATE TRIGGER closed_fits_never_change BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW
            EXECUTE FUNCTION refuse_change_of_closed_fit()
        """)


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)
    for function in ("refuse_change_of_closed_row", "refuse_change_of_observation", "refuse_change_of_closed_fit"):
        op.execute(f"DROP FUNCTION {function}()")
