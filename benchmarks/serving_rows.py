"""A results database of the size that the service must hold, written by SQL: every number is made up.

One grid of 100,000 cells of which two thirds are measured, and 400 grids of 250 cells with nine rules each; together
100,000 checkpoints and 1,000,000 evaluations, with their attempts, points of training, numbers of probes, observations
and fits. `share` makes all of it smaller.
"""

from __future__ import annotations

from sqlalchemy import Engine, text

RULES = ("raw", "last_m", "one_sqrt", "ema", "dare", "ties", "last_m 2", "last_m 8", "ema 2", "ties 2")

# g is the number of a grid, 0 the large one; s that of one of its segments; c of one of its cells; r of a rule.
_STATEMENTS = (
    "SET session_replication_role = replica",  # closed rows refuse nothing, and nobody looks up foreign keys
    "SET synchronous_commit = off",
    "INSERT INTO evaluators (id, spec) VALUES ('evaluator', '{}')",
    """
    INSERT INTO series (id, family, protocol, rule, evaluator_id, metric, label)
    SELECT 'series ' || r, 'family', 'constant', (CAST(:rules AS text[]))[r + 1], 'evaluator', 'log_longppl',
        'rule ' || r
    FROM generate_series(0, 9) r
    """,
    """
    INSERT INTO schedulers (id, host, pid, workers, "leading", seen_at)
    VALUES (md5('scheduler')::uuid, 'host', 1, 8, true, now() + interval '1 day')
    """,
    """
    CREATE TEMP TABLE sizes AS
    SELECT g, md5('grid ' || g)::uuid AS grid_id,
        CASE WHEN g = 0 THEN (100000 * :share)::int ELSE 250 END AS cells,
        CASE WHEN g = 0 THEN (1000 * :share)::int ELSE 20 END AS segments,
        CASE WHEN g = 0 THEN 20 ELSE 10 END AS steps
    FROM generate_series(0, (400 * :share)::int) g
    """,
    """
    INSERT INTO grids (id, name, protocol, document, document_hash, tokens_train, tokens_independent, flops, gpu_hours,
        bootstrap, created_at)
    SELECT grid_id, 'grid ' || g, 'constant', jsonb_build_object('name', g, 'scales', repeat('a', 2000)), md5(g::text),
        1e12, 5e12, 1e22, 1e4, 200, now() - make_interval(hours => (500 - g)::int)
    FROM sizes
    """,
    # The first tenth of a grid's segments are short ones that the others go on from.
    """
    CREATE TEMP TABLE stretches AS
    SELECT g, grid_id, s, steps, 'scale ' || s % 4 AS scale, md5('segment ' || g || ' ' || s) AS key,
        CASE WHEN s * 10 >= segments THEN md5('segment ' || g || ' ' || s % (segments / 10)) END AS parent_key,
        CASE WHEN g > 0 AND g % 20 <> 0 OR s * 3 < segments * 2 THEN 'SUCCEEDED'
             WHEN s * 100 < segments * 69 THEN 'RUNNING' WHEN s % 50 = 0 THEN 'FAILED'
             WHEN s % 7 = 0 THEN 'READY' ELSE 'PENDING' END AS state
    FROM sizes CROSS JOIN generate_series(0, segments - 1) s
    """,
    """
    INSERT INTO segments (key, generation, kind, scale, parent_key, parent_step, spec, tokens_per_step, target_step,
        state, reason, created_at, ended_at)
    SELECT key, 1, CASE WHEN parent_key IS NULL THEN 'short_trunk' ELSE 'long_constant' END, scale, parent_key,
        CASE WHEN parent_key IS NOT NULL THEN 1000 END, jsonb_build_object('seed', s, 'data', repeat('a', 600)), 524288,
        100 * steps, state, CASE WHEN state = 'FAILED' THEN 'the loss diverged' END, now() - interval '1 day',
        CASE WHEN state IN ('SUCCEEDED', 'FAILED') THEN now() END
    FROM stretches ORDER BY g, s
    """,
    "INSERT INTO grid_segments (grid_id, segment_key, target_step) SELECT grid_id, key, 100 * steps FROM stretches",
    """
    INSERT INTO segment_saves (segment_key, step)
    SELECT key, 100 * k FROM stretches CROSS JOIN generate_series(1, steps) k
    """,
    """
    INSERT INTO attempts (segment_id, number, token, scheduler_id, worker, state, start_step, progress_step,
        target_step, loss, tokens_per_s, lease_expires_at, ended_at)
    SELECT id, 1, md5('attempt at segment ' || id)::uuid, md5('scheduler')::uuid, 'worker-' || id % 8,
        state, 0, target_step / 2, target_step, 2.5, 1e6, now() + interval '1 day',
        CASE WHEN state <> 'RUNNING' THEN now() END
    FROM segments WHERE state IN ('SUCCEEDED', 'FAILED', 'RUNNING')
    """,
    """
    INSERT INTO checkpoints (segment_key, step, stage_tokens, path, digest, size_bytes, scheduled, mean_loss,
        attempt_id)
    SELECT t.key, 100 * k, 100 * k * 524288::bigint, 'checkpoints/' || t.key || '/' || k, md5(t.key || k), 1e9, true,
        2.5, a.id
    FROM stretches t JOIN segments x ON x.key = t.key JOIN attempts a ON a.segment_id = x.id
    CROSS JOIN generate_series(1, t.steps) k
    WHERE t.state = 'SUCCEEDED' OR k * 2 <= t.steps
    """,
    """
    INSERT INTO training_points (segment_key, step, loss, gradient_norm, learning_rate, tokens_per_s, mfu)
    SELECT key, k, 10.0 / sqrt(k), 1.0, 1e-4, 1e6, 0.4
    FROM stretches CROSS JOIN generate_series(1, 100 * steps, (CASE WHEN g = 0 THEN 2 ELSE 10 END)) k
    WHERE state <> 'PENDING' AND state <> 'READY'
    """,
    """
    CREATE TEMP TABLE wanted AS
    SELECT n.g, n.grid_id, c, r, t.key AS segment_key, t.scale, t.state AS trained,
        md5('evaluation ' || n.g || ' ' || c || ' ' || r) AS key,
        (1e8 * (1 + c % 4))::bigint AS n_params, (1e9 * (1 + c / 4 % 25))::bigint AS short_tokens,
        (1e8 * (1 + c / 100))::bigint AS long_tokens, 100 * (1 + c % n.steps) AS step
    FROM sizes n CROSS JOIN generate_series(0, n.cells - 1) c
    JOIN stretches t ON t.g = n.g AND t.s = n.segments / 10 + c % (n.segments - n.segments / 10)
    CROSS JOIN generate_series(CASE WHEN n.g = 0 THEN 0 ELSE 1 END, CASE WHEN n.g = 0 THEN 0 ELSE 9 END) r
    """,
    "ANALYZE",
    """
    INSERT INTO evaluations (key, generation, snapshot_id, segment_key, step, rule, evaluator_id, scale, n_params,
        short_tokens, long_tokens, short_seed, long_seed, cluster, state, reason, log_longppl, log_longppl_se,
        log_shortppl, log_shortppl_se, log_ppl, log_ppl_se, key_gap, key_count, short_count, all_count, documents,
        ended_at)
    SELECT key, 1, md5(key), segment_key, step,
        jsonb_build_object('name', split_part((CAST(:rules AS text[]))[r + 1], ' ', 1)), 'evaluator', scale, n_params,
        short_tokens, long_tokens, 0, 0, scale || '/' || short_tokens, state,
        CASE WHEN state = 'FAILED' THEN 'the documents are too short' END, y, y / 100, y, y / 100, y, y / 100, y / 10,
        ok * 1000, ok * 5000, ok * 8000, CASE WHEN ok = 1 THEN d.documents END,
        CASE WHEN state IN ('SUCCEEDED', 'FAILED') THEN now() END
    FROM wanted w
    CROSS JOIN (
        SELECT jsonb_agg(
            jsonb_build_object('key_sum', k * 1.1, 'key_count', k, 'short_sum', k * 2.3, 'short_count', 5 * k,
                'all_sum', k * 3.7, 'all_count', 8 * k)
        ) AS documents
        FROM generate_series(1, 24) k
    ) d
    CROSS JOIN LATERAL (
        SELECT CASE WHEN trained <> 'SUCCEEDED' THEN 'PENDING' WHEN (c * 7 + r) % 997 = 0 THEN 'FAILED'
                    WHEN g = 0 AND c % 11 = 0 THEN 'READY' WHEN g = 0 AND c % 1999 = 0 THEN 'RUNNING'
                    ELSE 'SUCCEEDED' END AS state
    ) one
    CROSS JOIN LATERAL (
        SELECT CASE WHEN one.state = 'SUCCEEDED' THEN 1 END AS ok,
            CASE WHEN one.state = 'SUCCEEDED'
                THEN 1.5 + 60 / sqrt(sqrt(n_params)) + 200 / cbrt(short_tokens) + 40 / sqrt(sqrt(long_tokens))
            END AS y
    ) two
    ORDER BY g, c, r
    """,
    """
    INSERT INTO cells (grid_id, key, scale, n_params, short_tokens, long_tokens, short_seed, long_seed, plan_status)
    SELECT grid_id, 'cell ' || c, min(scale), min(n_params), min(short_tokens), min(long_tokens), 0, 0, 'new'
    FROM wanted GROUP BY g, grid_id, c ORDER BY g, c
    """,
    """
    INSERT INTO cell_evaluations (cell_id, evaluation_key, series_id)
    SELECT x.id, w.key, 'series ' || w.r FROM wanted w JOIN cells x ON x.grid_id = w.grid_id AND x.key = 'cell ' || w.c
    """,
    "INSERT INTO grid_evaluations (grid_id, evaluation_key) SELECT grid_id, key FROM wanted",
    """
    INSERT INTO attempts (evaluation_id, number, token, scheduler_id, worker, state, lease_expires_at, ended_at)
    SELECT id, 1, md5('attempt at evaluation ' || id)::uuid, md5('scheduler')::uuid, 'worker-' || id % 8, state,
        now() + interval '1 day', CASE WHEN state <> 'RUNNING' THEN now() END
    FROM evaluations WHERE state IN ('SUCCEEDED', 'FAILED', 'RUNNING')
    """,
    """
    INSERT INTO metrics (evaluation_id, name, value, count, length, depth)
    SELECT e.id, CASE WHEN k < 5 THEN 'passkey_accuracy' ELSE 'position_loss' END, 0.5, 100, 32768, k / 10.0
    FROM evaluations e CROSS JOIN generate_series(0, 9) k WHERE e.state = 'SUCCEEDED' AND e.id % 19 = 0
    """,
    """
    INSERT INTO observations (series_id, evaluation_key, scale, n_params, short_tokens, long_tokens, short_seed,
        long_seed, cluster, y, y_se, source)
    SELECT 'series ' || w.r, w.key, w.scale, w.n_params, w.short_tokens, w.long_tokens, 0, 0, e.cluster, e.log_longppl,
        e.log_longppl_se, 'run'
    FROM wanted w JOIN evaluations e ON e.key = w.key WHERE e.state = 'SUCCEEDED' ORDER BY e.id
    """,
    """
    INSERT INTO fits (id, series_id, law, bootstrap, state, status, reason, last_observation_id, objective, level,
        n_draws_ok, n_observations, n_clusters, residual_std, r2, mape_log, n_params_min, n_params_max,
        short_tokens_min, short_tokens_max, long_tokens_min, long_tokens_max, warnings, explanation, created_at,
        ended_at)
    SELECT md5('fit ' || f)::uuid, 'series ' || f % 10, 'long_context', 200,
        CASE WHEN f % 50 = 0 THEN 'FAILED' ELSE 'SUCCEEDED' END, 'CONVERGED', 'a reason', 1000, 1.0, 0.9, 200,
        1000, 100, 0.01, 0.99, 1.0, 1e8, 4e8, 1e9, 25e9, 1e8, 1e11, '[]', '["in words"]',
        now() - make_interval(mins => f::int), now()
    FROM generate_series(0, (5000 * :share)::int) f
    """,
    """
    INSERT INTO fit_parameters (fit_id, position, name, value, low, high, at_bound, identifiable)
    SELECT f.id, p.position - 1, p.name, p.value, p.value * 0.9, p.value * 1.1, false, true
    FROM fits f CROSS JOIN LATERAL unnest(
        ARRAY['A', 'alpha', 'B_s', 'beta_s', 'B_l', 'beta_l', 'C'], ARRAY[60, 0.25, 200, 0.3, 40, 0.2, 1.5]
    ) WITH ORDINALITY p (name, value, position)
    """,
    """
    INSERT INTO fit_observations (fit_id, observation_id, role, predicted, low, high)
    SELECT f.id, o.id, 'fitted', o.y, o.y - 0.01, o.y + 0.01
    FROM (SELECT id, series_id FROM fits ORDER BY created_at DESC LIMIT 200) f
    CROSS JOIN LATERAL (SELECT id, y FROM observations WHERE series_id = f.series_id ORDER BY id LIMIT 1000) o
    """,
    """
    INSERT INTO fit_draws (fit_id, draw, amplitude_n, alpha, amplitude_s, beta_s, amplitude_l, beta_l, "offset")
    SELECT f.id, d, 60 + d % 7, 0.25, 200 + d % 11, 0.3, 40 + d % 5, 0.2, 1.5
    FROM (SELECT id FROM fits ORDER BY created_at DESC LIMIT 200) f CROSS JOIN generate_series(0, 199) d
    """,
    """
    INSERT INTO events (kind, grid_id, subject)
    SELECT 'segment_succeeded', grid_id, key FROM stretches
    """,
    "SET session_replication_role = origin",
    "VACUUM (ANALYZE)",  # as a server does by itself in time
)


def fill(engine: Engine, *, share: float = 1.0) -> None:
    """Fills a migrated, empty database."""
    given = {"rules": list(RULES), "share": share}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in _STATEMENTS:
            asked = {name: value for name, value in given.items() if f":{name}" in statement}
            connection.execute(text(statement), asked)
