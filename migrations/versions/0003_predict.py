"""The read contract: functions of the schema `research` that evaluate a fitted law.

Anyone may call them; they read through the views, so only who may read those gets an answer.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# The order of operations is that of `fitting.predict.log_longppl`.
LAW = """
CREATE FUNCTION research.law_log_longppl(
    a double precision, alpha double precision,
    b_s double precision, beta_s double precision,
    b_l double precision, beta_l double precision,
    c double precision,
    n_params double precision, short_tokens double precision, long_tokens double precision
) RETURNS double precision LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN a * power(n_params, -alpha) + b_s * power(short_tokens, -beta_s) + b_l * power(long_tokens, -beta_l) + c
"""

PREDICT = """
CREATE FUNCTION research.predict_log_longppl(
    fit_id uuid, n_params double precision, short_tokens double precision, long_tokens double precision
) RETURNS double precision LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE AS $$
DECLARE
    fit record;
    p double precision[];
BEGIN
    IF NOT (n_params > 0 AND n_params < 'Infinity' AND short_tokens > 0 AND short_tokens < 'Infinity'
            AND long_tokens > 0 AND long_tokens < 'Infinity') THEN
        RAISE EXCEPTION 'n_params %, short_tokens %, long_tokens %: each must be a positive finite number',
            n_params, short_tokens, long_tokens USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT f.law, f.state INTO fit FROM research.fits f WHERE f.fit_id = predict_log_longppl.fit_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no fit %', fit_id USING ERRCODE = 'no_data_found';
    ELSIF fit.state <> 'SUCCEEDED' THEN
        RAISE EXCEPTION 'fit % is %, it has no parameters', fit_id, fit.state USING ERRCODE = 'no_data_found';
    ELSIF fit.law <> 'long_context' THEN
        RAISE EXCEPTION 'SQL cannot evaluate the law %', fit.law USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT array_agg(q.value ORDER BY q.position) INTO p
    FROM research.fit_parameters q WHERE q.fit_id = predict_log_longppl.fit_id;
    RETURN research.law_log_longppl(
        p[1], p[2], p[3], p[4], p[5], p[6], p[7], n_params, short_tokens, long_tokens
    );
END $$
"""

# Withheld where `fitting.predict` withholds it: along an axis whose exponent is open. There the law is known where it was
# observed: in the range of an axis that was hardly varied (by 1 % at most), else at the ends of the range, and nowhere
# where two such axes are open.
PREDICT_INTERVAL = """
CREATE FUNCTION research.predict_log_longppl_interval(
    fit_id uuid, n_params double precision, short_tokens double precision, long_tokens double precision,
    level double precision DEFAULT 0.9
) RETURNS TABLE (value double precision, low double precision, high double precision)
LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE ROWS 1 AS $$
DECLARE
    bounds double precision[];
    is_open boolean;
BEGIN
    IF NOT (level > 0 AND level < 1) THEN
        RAISE EXCEPTION 'level is %; it must lie between 0 and 1', level USING ERRCODE = 'invalid_parameter_value';
    END IF;
    value := research.predict_log_longppl(fit_id, n_params, short_tokens, long_tokens);
    SELECT coalesce(
        bool_or(narrow AND size NOT BETWEEN smallest AND largest)
        OR bool_or(wide AND size NOT IN (smallest, largest))
        OR count(*) FILTER (WHERE wide) > 1,
        false
    ) INTO is_open
    FROM (
        SELECT axis.*, n.narrow, NOT n.narrow AND b.value > 0 AS wide
        FROM research.fits f
        CROSS JOIN LATERAL (
            VALUES
                ('A', 'alpha', n_params, f.n_params_min, f.n_params_max),
                ('B_s', 'beta_s', short_tokens, f.short_tokens_min, f.short_tokens_max),
                ('B_l', 'beta_l', long_tokens, f.long_tokens_min, f.long_tokens_max)
        ) axis (amplitude, exponent, size, smallest, largest)
        CROSS JOIN LATERAL (SELECT axis.largest <= 1.01::double precision * axis.smallest AS narrow) n
        JOIN research.fit_parameters b ON b.fit_id = f.fit_id AND b.name = axis.amplitude
        JOIN research.fit_parameters e ON e.fit_id = f.fit_id AND e.name = axis.exponent AND NOT e.identifiable
        WHERE f.fit_id = predict_log_longppl_interval.fit_id
    ) open_axis;
    IF NOT is_open THEN
        SELECT percentile_cont(ARRAY[(1 - level) / 2, (1 + level) / 2]) WITHIN GROUP (ORDER BY
            research.law_log_longppl(
                d.a, d.alpha, d.b_s, d.beta_s, d.b_l, d.beta_l, d.c, n_params, short_tokens, long_tokens
            )
        ) INTO bounds
        FROM research.fit_draws d WHERE d.fit_id = predict_log_longppl_interval.fit_id;
        low := bounds[1];
        high := bounds[2];
    END IF;
    RETURN NEXT;
END $$
"""

FUNCTION_COMMENTS = {
    "law_log_longppl": "log LongPPL = a N^-alpha + b_s D_s^-beta_s + b_l D_l^-beta_l + c, nats, absolute counts.",
    "predict_log_longppl": "What a finished fit says at one point: log LongPPL in nats.",
    "predict_log_longppl_interval": (
        "The same with the confidence interval of the law at a level, read from the bootstrap draws of the fit; "
        "low and high are NULL where the fit withholds them."
    ),
}


def upgrade() -> None:
    for function in (LAW, PREDICT, PREDICT_INTERVAL):
        op.execute(function)
    for name, comment in FUNCTION_COMMENTS.items():
        op.execute(f"COMMENT ON FUNCTION research.{name} IS '{comment}'")


def downgrade() -> None:
    for name in reversed(FUNCTION_COMMENTS):
        op.execute(f"DROP FUNCTION research.{name}")
