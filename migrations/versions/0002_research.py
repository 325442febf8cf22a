"""The read contract: schema `research` with its views, and the role that may read it.

Tables may change in later revisions; names and types here may not. A view that must grow gets columns at its end.

Revision ID: 0002
Revises: 0001
"""

from dataclasses import dataclass

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view: (column, expression, comment) in order, and what follows FROM."""

    name: str
    comment: str
    columns: tuple[tuple[str, str, str], ...]
    source: str

    def statements(self) -> list[str]:
        selected = ",\n    ".join(f'{expression} AS "{column}"' for column, expression, _ in self.columns)
        return [
            f"CREATE VIEW research.{self.name} AS\nSELECT\n    {selected}\nFROM {self.source}",
            f"COMMENT ON VIEW research.{self.name} IS {_quoted(self.comment)}",
            *(
                f'COMMENT ON COLUMN research.{self.name}."{column}" IS {_quoted(comment)}'
                for column, _, comment in self.columns
            ),
        ]


def _quoted(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"


def _exp(column: str) -> str:
    """exp() that answers NULL where a double cannot hold it: one such row would fail every query on the view."""
    return f"CASE WHEN {column} BETWEEN -700 AND 700 THEN exp({column}) END"


def _point(table: str) -> tuple[tuple[str, str, str], ...]:
    return (
        ("scale", f"{table}.scale", "Name of the model size."),
        ("n_params", f"{table}.n_params", "N, non-embedding parameters."),
        ("short_tokens", f"{table}.short_tokens", "D_s, tokens of the short-context stage."),
        ("long_tokens", f"{table}.long_tokens", "D_l, tokens of the long-context stage."),
        ("short_seed", f"{table}.short_seed", "Seed of initialisation and of the order of the short stage."),
        ("long_seed", f"{table}.long_seed", "Seed of the order of the long stage."),
    )


CELL_EVALUATIONS = View(
    name="cell_evaluations",
    comment="One row per cell and observation rule: which measurement the cell waits for or has.",
    columns=(
        ("grid_id", "c.grid_id", "The grid that asks."),
        ("cell_id", "c.id", "The cell."),
        *_point("c"),
        ("series_id", "ce.series_id", "The series that the measurement belongs to."),
        ("rule", "s.rule", "The observation rule."),
        ("evaluation_key", "ce.evaluation_key", "Identity of the evaluation; several cells may share it."),
        (
            "state",
            """CASE
        WHEN e.state = 'SUCCEEDED' THEN 'MEASURED'
        WHEN e.state IN ('FAILED', 'CANCELLED', 'RUNNING') THEN e.state
        WHEN EXISTS (
            SELECT FROM segments g WHERE g.key = e.segment_key AND g.state = 'RUNNING'
        ) THEN 'RUNNING'
        ELSE 'PENDING'
    END""",
            "MEASURED, FAILED, CANCELLED, RUNNING (being measured, or its segment is training) or PENDING.",
        ),
        ("reason", "e.reason", "Why it failed or was cancelled, or why there is no number."),
        ("log_longppl", "e.log_longppl", "The measurement in nats per token; NULL until MEASURED."),
    ),
    source="""cell_evaluations ce
    JOIN cells c ON c.id = ce.cell_id
    JOIN series s ON s.id = ce.series_id
    LEFT JOIN LATERAL (
        SELECT state, reason, log_longppl, segment_key FROM evaluations
        WHERE key = ce.evaluation_key ORDER BY generation DESC LIMIT 1
    ) e ON true""",
)

CELLS = View(
    name="cells",
    comment="One row per cell of a grid, with the state that follows from its evaluations.",
    columns=(
        ("grid_id", "c.grid_id", "The grid that asks."),
        ("cell_id", "c.id", "The cell."),
        ("cell_key", "c.key", "Identity of the cell within its grid."),
        *_point("c"),
        ("plan_status", "c.plan_status", "What the planner found at submission: reused, in_flight, extended or new."),
        (
            "state",
            """CASE
        WHEN e.measured = e.asked AND e.asked > 0 THEN 'MEASURED'
        WHEN e.running > 0 THEN 'RUNNING'
        WHEN e.pending > 0 THEN 'PENDING'
        WHEN e.failed > 0 THEN 'FAILED'
        WHEN e.cancelled > 0 THEN 'CANCELLED'
        ELSE 'PENDING'
    END""",
            "MEASURED with every rule; RUNNING or PENDING while a rule is; else FAILED or CANCELLED.",
        ),
        ("reason", "e.reason", "The first reason given by its evaluations."),
        ("evaluations", "e.asked", "How many rules the cell is measured by."),
        ("evaluations_measured", "e.measured", "How many of them are done."),
    ),
    source="""cells c
    CROSS JOIN LATERAL (
        SELECT
            count(*) AS asked,
            count(*) FILTER (WHERE v.state = 'MEASURED') AS measured,
            count(*) FILTER (WHERE v.state = 'FAILED') AS failed,
            count(*) FILTER (WHERE v.state = 'CANCELLED') AS cancelled,
            count(*) FILTER (WHERE v.state = 'RUNNING') AS running,
            count(*) FILTER (WHERE v.state = 'PENDING') AS pending,
            min(v.reason) AS reason
        FROM research.cell_evaluations v WHERE v.cell_id = c.id
    ) e""",
)

GRIDS = View(
    name="grids",
    comment="One row per submitted grid, with its planned totals and how many cells are in which state.",
    columns=(
        ("grid_id", "g.id", "The grid."),
        ("name", "g.name", "The name it was submitted under."),
        ("protocol", "g.protocol", "Schedule of the long stage: constant or linear_decay."),
        ("holdout", "g.holdout", "The selection of observations kept from the fit, if any."),
        ("document", "g.document", "The grid as it was submitted."),
        ("tokens_train", "g.tokens_train", "Tokens the plan had to train, prefixes shared and results reused."),
        ("tokens_independent", "g.tokens_independent", "Tokens of the same cells trained one by one."),
        ("flops", "g.flops", "Planned floating-point operations."),
        ("gpu_hours", "g.gpu_hours", "Planned GPU-hours at the grid's stated rate."),
        ("created_at", "g.created_at", "When it was submitted."),
        ("cells", "c.total", "Cells asked for."),
        ("cells_measured", "c.measured", "Cells with all their measurements."),
        ("cells_running", "c.running", "Cells being trained or measured."),
        ("cells_pending", "c.pending", "Cells that wait."),
        ("cells_failed", "c.failed", "Cells that failed."),
        ("cells_cancelled", "c.cancelled", "Cells that were cancelled."),
    ),
    source="""grids g
    CROSS JOIN LATERAL (
        SELECT
            count(*) AS total,
            count(*) FILTER (WHERE v.state = 'MEASURED') AS measured,
            count(*) FILTER (WHERE v.state = 'RUNNING') AS running,
            count(*) FILTER (WHERE v.state = 'PENDING') AS pending,
            count(*) FILTER (WHERE v.state = 'FAILED') AS failed,
            count(*) FILTER (WHERE v.state = 'CANCELLED') AS cancelled
        FROM research.cells v WHERE v.grid_id = g.id
    ) c""",
)

CHECKPOINTS = View(
    name="checkpoints",
    comment="One row per durable checkpoint; those of one segment_key are one open-ended trajectory.",
    columns=(
        ("checkpoint_id", "c.id", "The checkpoint."),
        ("segment_key", "c.segment_key", "Identity of the segment."),
        ("segment_kind", "s.kind", "short_trunk, short_decay, long_constant or long_linear_decay."),
        ("scale", "s.scale", "Name of the model size."),
        ("seed", "(s.spec ->> 'seed')::bigint", "short_seed of a short segment, long_seed of a long one."),
        ("parent_segment_key", "s.parent_key", "The segment it branched off; NULL from scratch."),
        ("parent_step", "s.parent_step", "The step of the parent at which it did."),
        ("step", "c.step", "Optimizer steps since the segment began."),
        ("stage_tokens", "c.stage_tokens", "Tokens of the stage consumed: D_s of a short segment, D_l of a long one."),
        ("mean_loss", "c.mean_loss", "Mean training loss in nats per token since the checkpoint before."),
        ("scheduled", "c.scheduled", "True where a rule or a branch needs it, false where it only serves recovery."),
        ("size_bytes", "c.size_bytes", "Size of the file."),
        ("path", "c.path", "Where it lies, relative to the store."),
        ("digest", "c.digest", "Digest of the file."),
        ("created_at", "c.created_at", "When it was recorded."),
    ),
    source="""checkpoints c
    LEFT JOIN LATERAL (
        SELECT kind, scale, spec, parent_key, parent_step FROM segments
        WHERE key = c.segment_key ORDER BY generation DESC LIMIT 1
    ) s ON true""",
)

LONGPPL = View(
    name="longppl",
    comment="One row per finished measurement, diagnostics with D_l = 0 included. Logs are nats, pooled over tokens.",
    columns=(
        ("evaluation_key", "e.key", "Identity of the measurement: a snapshot and an evaluator."),
        ("segment_key", "e.segment_key", "The segment whose checkpoints were evaluated."),
        ("step", "e.step", "The step of that segment."),
        ("rule", "e.rule ->> 'name'", "How checkpoints became the model evaluated: raw, last_m."),
        ("rule_m", "(e.rule ->> 'm')::integer", "How many checkpoints were merged."),
        ("rule_spacing_steps", "(e.rule ->> 'spacing_steps')::bigint", "Steps between them."),
        ("evaluator_id", "e.evaluator_id", "Reference model, documents, thresholds and chunking."),
        *_point("e"),
        ("cluster", "e.cluster", "The short checkpoint it descends from; rows of one cluster share its noise."),
        ("log_longppl", "e.log_longppl", "Mean NLL over key tokens; NULL, with a reason, where there are none."),
        ("log_longppl_se", "e.log_longppl_se", "Its standard error over documents."),
        ("longppl", _exp("e.log_longppl"), "exp(log_longppl)."),
        ("log_shortppl", "e.log_shortppl", "Mean NLL over tokens that the local chunk predicts better."),
        ("log_shortppl_se", "e.log_shortppl_se", "Its standard error over documents."),
        ("shortppl", _exp("e.log_shortppl"), "exp(log_shortppl)."),
        ("log_ppl", "e.log_ppl", "Mean NLL over all predicted tokens."),
        ("log_ppl_se", "e.log_ppl_se", "Its standard error over documents."),
        ("ppl", _exp("e.log_ppl"), "exp(log_ppl)."),
        ("key_gap", "e.key_gap", "Mean NLL on key tokens with local context only, minus that with full context."),
        ("key_count", "e.key_count", "Key tokens."),
        ("short_count", "e.short_count", "Tokens in log_shortppl."),
        ("all_count", "e.all_count", "Predicted tokens."),
        ("reason", "e.reason", "Why a number is missing."),
        ("measured_at", "e.ended_at", "When the measurement was recorded."),
    ),
    source="evaluations e WHERE e.state = 'SUCCEEDED'",
)

SERIES = View(
    name="series",
    comment="One row per series: what one fit may pool.",
    columns=(
        ("series_id", "s.id", "The series."),
        ("label", "s.label", "Its name in words."),
        ("family", "s.family", "Identity of the recipe without its scale."),
        ("protocol", "s.protocol", "Schedule of the long stage."),
        ("rule", "s.rule", "The observation rule."),
        ("evaluator_id", "s.evaluator_id", "The evaluator."),
        ("metric", "s.metric", "What the observations y are."),
        ("created_at", "s.created_at", "When it was first asked for."),
        (
            "latest_fit_id",
            """(
        SELECT f.id FROM fits f WHERE f.series_id = s.id AND f.state = 'SUCCEEDED' AND f.holdout IS NULL
        ORDER BY f.created_at DESC, f.id DESC LIMIT 1
    )""",
            "Its newest finished fit of all observations; NULL before the first.",
        ),
    ),
    source="series s",
)

OBSERVATIONS = View(
    name="observations",
    comment="One row per observation: what laws are fitted to. Rows are never changed and never deleted.",
    columns=(
        ("observation_id", "o.id", "The observation."),
        ("series_id", "o.series_id", "Its series."),
        ("evaluation_key", "o.evaluation_key", "The measurement it is; NULL where it was imported."),
        *_point("o"),
        ("cluster", "o.cluster", "The short checkpoint it descends from; rows of one cluster share its noise."),
        ("metric", "s.metric", "What y is."),
        ("y", "o.y", "The value fitted, in nats."),
        ("y_se", "o.y_se", "Its standard error, where known."),
        ("source", "o.source", "run (measured here) or imported."),
        ("created_at", "o.created_at", "When it was recorded."),
    ),
    source="observations o JOIN series s ON s.id = o.series_id",
)

FITS = View(
    name="fits",
    comment="One row per fit of a law to a frozen set of observations. Rows with an ended_at never change.",
    columns=(
        ("fit_id", "f.id", "The fit."),
        ("series_id", "f.series_id", "The series it pools."),
        ("law", "f.law", "Name of the law."),
        ("holdout", "f.holdout", "The observations predicted but not fitted; NULL where all are fitted."),
        ("state", "f.state", "PENDING, RUNNING, SUCCEEDED or FAILED."),
        ("reason", "f.reason", "Why it failed."),
        ("status", "f.status", "How the optimisation ended: CONVERGED, AT_BOUND, NOT_IDENTIFIABLE, ..."),
        ("objective", "f.objective", "Sum of the Huber loss over the fitted observations."),
        ("gradient_norm", "f.gradient_norm", "Largest component of its gradient at the answer."),
        ("huber_delta", "f.huber_delta", "Where the loss turns from quadratic to linear, nats."),
        ("level", "f.level", "Nominal coverage of the stored intervals."),
        ("seed", "f.seed", "Seed of the bootstrap."),
        ("bootstrap", "f.bootstrap", "Bootstrap refits asked for."),
        ("n_draws_ok", "f.n_draws_ok", "Bootstrap refits that were good."),
        ("n_observations", "f.n_observations", "Observations fitted."),
        ("n_clusters", "f.n_clusters", "Clusters that were resampled."),
        ("jacobian_rank", "f.jacobian_rank", "Directions of parameter space that the observations determine."),
        ("residual_std", "f.residual_std", "Standard deviation of one observation about the law, nats."),
        ("r2", "f.r2", "1 - SS_res/SS_tot on the fitted observations."),
        ("mape_log", "f.mape_log", "Mean absolute relative error of y on the fitted observations, percent."),
        ("holdout_n", "f.holdout_n", "Observations held out."),
        ("holdout_r2", "f.holdout_r2", "1 - SS_res/SS_tot on the held-out observations."),
        (
            "holdout_mape_log",
            "f.holdout_mape_log",
            "Mean absolute relative error of y on the held-out observations, percent.",
        ),
        ("holdout_mape_ppl", "f.holdout_mape_ppl", "The same of exp(y), percent."),
        ("holdout_bias", "f.holdout_bias", "Mean of predicted minus observed on the held-out observations, nats."),
        ("n_params_min", "f.n_params_min", "Smallest N fitted."),
        ("n_params_max", "f.n_params_max", "Largest N fitted."),
        ("short_tokens_min", "f.short_tokens_min", "Smallest D_s fitted."),
        ("short_tokens_max", "f.short_tokens_max", "Largest D_s fitted."),
        ("long_tokens_min", "f.long_tokens_min", "Smallest D_l fitted."),
        ("long_tokens_max", "f.long_tokens_max", "Largest D_l fitted."),
        ("warnings", "f.warnings", "What a reader of the numbers should know, an array of texts."),
        ("explanation", "f.explanation", "The fit in plain words, an array of texts."),
        ("created_at", "f.created_at", "When it was queued; its observations are those of that moment."),
        ("ended_at", "f.ended_at", "When it was done."),
    ),
    source="fits f",
)

FIT_PARAMETERS = View(
    name="fit_parameters",
    comment="One row per parameter of a finished fit, for absolute counts of parameters and tokens.",
    columns=(
        ("fit_id", "p.fit_id", "The fit."),
        ("position", "p.position", "Place in the law's order, from 0."),
        ("name", "p.name", "A, alpha, B_s, beta_s, B_l, beta_l or C."),
        ("value", "p.value", "The estimate."),
        ("low", "p.low", "Lower end of its interval; NULL where withheld."),
        ("high", "p.high", "Upper end of its interval; NULL where withheld."),
        ("at_bound", "p.at_bound", "True where it ended at the edge of its range."),
        ("identifiable", "p.identifiable", "False where the observations leave it open: one choice among many."),
    ),
    source="fit_parameters p",
)

FIT_DRAWS = View(
    name="fit_draws",
    comment="One row per bootstrap refit of a fit: the parameters that intervals are read from.",
    columns=(
        ("fit_id", "d.fit_id", "The fit."),
        ("draw", "d.draw", "Number of the refit, from 0."),
        ("a", "d.amplitude_n", "A."),
        ("alpha", "d.alpha", "alpha."),
        ("b_s", "d.amplitude_s", "B_s."),
        ("beta_s", "d.beta_s", "beta_s."),
        ("b_l", "d.amplitude_l", "B_l."),
        ("beta_l", "d.beta_l", "beta_l."),
        ("c", 'd."offset"', "C, of either sign."),
    ),
    source="fit_draws d",
)

PREDICTIONS = View(
    name="predictions",
    comment="Observed against predicted, for the newest finished fit of each series and holdout.",
    columns=(
        ("fit_id", "f.id", "The fit."),
        ("series_id", "f.series_id", "Its series."),
        ("law", "f.law", "Name of the law."),
        ("holdout", "f.holdout", "The holdout of the fit; NULL where all observations are fitted."),
        ("observation_id", "o.id", "The observation."),
        *_point("o"),
        ("role", "fo.role", "fitted, held_out (predicted, never fitted) or excluded."),
        ("observed", "o.y", "The value measured, nats."),
        ("predicted", "fo.predicted", "The law's value, nats."),
        ("low", "fo.low", "Lower end of the law's confidence interval; NULL where withheld."),
        ("high", "fo.high", "Upper end of the law's confidence interval; NULL where withheld."),
        ("level", "f.level", "Nominal coverage of that interval."),
    ),
    source="""(
        SELECT DISTINCT ON (series_id, law, holdout) id, series_id, law, holdout, level
        FROM fits WHERE state = 'SUCCEEDED'
        ORDER BY series_id, law, holdout, created_at DESC, id DESC
    ) f
    JOIN fit_observations fo ON fo.fit_id = f.id
    JOIN observations o ON o.id = fo.observation_id""",
)

COSTS = View(
    name="costs",
    comment="What a grid's work took, per model size. Shared work counts in each grid: do not add grids up.",
    columns=(
        ("grid_id", "g.id", "The grid."),
        ("scale", "w.scale", "Name of the model size."),
        ("segments", "w.segments", "Segments the grid needs."),
        ("tokens_trained", "w.tokens_trained", "Tokens behind the newest checkpoints it needs."),
        (
            "tokens_processed",
            "w.tokens_processed",
            "Tokens that attempts at them went through, repeated ones included.",
        ),
        ("training_attempts", "w.training_attempts", "Attempts at its segments."),
        ("training_attempts_failed", "w.training_attempts_failed", "Those that failed or were lost."),
        ("training_worker_s", "w.training_worker_s", "Seconds workers spent on them, running ones included."),
        ("evaluations", "w.evaluations", "Evaluations the grid needs."),
        ("evaluation_attempts", "w.evaluation_attempts", "Attempts at them."),
        ("evaluation_attempts_failed", "w.evaluation_attempts_failed", "Those that failed or were lost."),
        ("evaluation_worker_s", "w.evaluation_worker_s", "Seconds workers spent on them, running ones included."),
    ),
    source="""grids g
    CROSS JOIN LATERAL (
        SELECT
            part.scale,
            sum(part.segments)::bigint AS segments,
            sum(part.tokens_trained)::bigint AS tokens_trained,
            sum(part.tokens_processed)::bigint AS tokens_processed,
            coalesce(sum(part.attempts) FILTER (WHERE part.segments = 1), 0)::bigint AS training_attempts,
            coalesce(sum(part.failed) FILTER (WHERE part.segments = 1), 0)::bigint AS training_attempts_failed,
            coalesce(sum(part.worker_s) FILTER (WHERE part.segments = 1), 0) AS training_worker_s,
            sum(1 - part.segments)::bigint AS evaluations,
            coalesce(sum(part.attempts) FILTER (WHERE part.segments = 0), 0)::bigint AS evaluation_attempts,
            coalesce(sum(part.failed) FILTER (WHERE part.segments = 0), 0)::bigint AS evaluation_attempts_failed,
            coalesce(sum(part.worker_s) FILTER (WHERE part.segments = 0), 0) AS evaluation_worker_s
        FROM (
            SELECT
                s.scale,
                1 AS segments,
                s.tokens_per_step * coalesce((
                    SELECT max(c.step) FROM checkpoints c
                    WHERE c.segment_key = gs.segment_key AND c.step <= gs.target_step
                ), 0) AS tokens_trained,
                s.tokens_per_step * a.steps AS tokens_processed,
                a.attempts, a.failed, a.worker_s
            FROM grid_segments gs
            CROSS JOIN LATERAL (
                SELECT scale, tokens_per_step FROM segments
                WHERE key = gs.segment_key ORDER BY generation DESC LIMIT 1
            ) s
            CROSS JOIN LATERAL (
                SELECT
                    count(*) AS attempts,
                    count(*) FILTER (WHERE t.state IN ('FAILED', 'LOST')) AS failed,
                    coalesce(sum(extract(epoch FROM coalesce(t.ended_at, now()) - t.started_at)::double precision), 0)
                        AS worker_s,
                    coalesce(sum(greatest(
                        t.progress_step, t.start_step, (SELECT max(step) FROM checkpoints WHERE attempt_id = t.id), 0
                    ) - coalesce(t.start_step, 0)), 0) AS steps
                FROM segments g2 JOIN attempts t ON t.segment_id = g2.id
                WHERE g2.key = gs.segment_key
            ) a
            WHERE gs.grid_id = g.id
            UNION ALL
            SELECT e.scale, 0, 0, 0, a.attempts, a.failed, a.worker_s
            FROM grid_evaluations ge
            CROSS JOIN LATERAL (SELECT scale FROM evaluations WHERE key = ge.evaluation_key LIMIT 1) e
            CROSS JOIN LATERAL (
                SELECT
                    count(*) AS attempts,
                    count(*) FILTER (WHERE t.state IN ('FAILED', 'LOST')) AS failed,
                    coalesce(sum(extract(epoch FROM coalesce(t.ended_at, now()) - t.started_at)::double precision), 0)
                        AS worker_s
                FROM evaluations e2 JOIN attempts t ON t.evaluation_id = e2.id
                WHERE e2.key = ge.evaluation_key
            ) a
            WHERE ge.grid_id = g.id
        ) part
        GROUP BY part.scale
    ) w""",
)

# Each after those it reads.
VIEWS = (
    CELL_EVALUATIONS,
    CELLS,
    GRIDS,
    CHECKPOINTS,
    LONGPPL,
    SERIES,
    OBSERVATIONS,
    FITS,
    FIT_PARAMETERS,
    FIT_DRAWS,
    PREDICTIONS,
    COSTS,
)

# Roles belong to the whole server: another database may have made it already, or be making it now.
READER = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'longlaw_reader') THEN
        CREATE ROLE longlaw_reader NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;
    WHEN insufficient_privilege THEN
        RAISE WARNING 'no right to create the role longlaw_reader: an administrator must, see docs/sql.md';
END $$
"""

GRANTS = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'longlaw_reader') THEN
        GRANT USAGE ON SCHEMA research TO longlaw_reader;
        GRANT SELECT ON ALL TABLES IN SCHEMA research TO longlaw_reader;
        ALTER DEFAULT PRIVILEGES IN SCHEMA research GRANT SELECT ON TABLES TO longlaw_reader;
    END IF;
END $$
"""


def upgrade() -> None:
    op.execute("CREATE SCHEMA research")
    op.execute("COMMENT ON SCHEMA research IS 'What may be read: stable views and functions. See docs/sql.md.'")
    for view in VIEWS:
        for statement in view.statements():
            op.execute(statement)
    op.execute(READER)
    op.execute(GRANTS)


def downgrade() -> None:
    op.execute("DROP SCHEMA research CASCADE")  # the role stays: other databases of the server may use it
