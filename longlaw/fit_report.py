"""How ``longlaw fit`` shows a fit: one JSON object, or tables for a reader."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fitting.compare import Contender
from fitting.explain import explain
from fitting.laws import law_named
from fitting.profile import Profile
from fitting.values import Fit, Holdout, Interval, RejectedRow


def as_json(
    result: Fit,
    excluded: tuple[RejectedRow, ...],
    profiles: Sequence[Profile],
    contenders: Sequence[Contender],
) -> dict[str, object]:
    """The fit as JSON; ``params`` hold for absolute counts, ``objective`` is without the penalty."""
    names = law_named(result.law).parameter_names
    plain = result.unpenalised or result
    return {
        "law": result.law,
        "status": result.status.value,
        "objective": result.objective,
        "gradient_norm": result.gradient_norm,
        "params": dict(zip(names, result.parameters, strict=True)),
        "intervals": dict(zip(names, map(_pair, result.intervals), strict=True)),
        "level": result.level,
        "n_observations": result.n_observations,
        "n_clusters": result.n_clusters,
        "n_draws": result.n_draws,
        "n_draws_ok": result.n_draws_ok,
        "resampled": result.resampled.value,
        "residual": result.residual.value,
        "loss": result.loss.value,
        "huber_delta": result.huber_delta,
        "residual_std": result.residual_std,
        "r2": result.r2,
        "mape_log": result.mape_log,
        "at_bound": list(result.at_bound),
        "not_identifiable": list(result.not_identifiable),
        "jacobian_rank": result.jacobian_rank,
        "condition_number": result.condition_number,
        "n_starts": result.n_starts,
        "agreement": result.agreement,
        "holdout": _scores(result.holdout),
        "penalty": {"lambda": result.penalty.strength, "binds": bool(result.penalty.binds)},
        "references": {
            item.parameter: {
                "value": item.value,
                "slices": item.n_slices,
                "binds": item.parameter in result.penalty.binds,
            }
            for item in result.penalty.references
        },
        "unpenalised": {
            "status": plain.status.value,
            "objective": plain.objective,
            "gradient_norm": plain.gradient_norm,
            "params": dict(zip(names, plain.parameters, strict=True)),
            "holdout": _scores(plain.holdout),
        },
        "profile_intervals": {item.parameter: _pair(item.interval) for item in profiles},
        "comparison": [
            {
                "name": item.name,
                "n_parameters": item.n_parameters,
                "status": None if item.status is None else item.status.value,
                "objective": item.objective,
                "bic": item.bic,
                "r2": item.r2,
                "mape_log": item.mape_log,
                "holdout": _scores(item.holdout),
            }
            for item in contenders
        ],
        "excluded": [{"row": row.row, "reason": row.reason} for row in excluded],
        "warnings": list(result.warnings),
    }


def show(
    result: Fit,
    excluded: tuple[RejectedRow, ...],
    profiles: Sequence[Profile],
    contenders: Sequence[Contender],
) -> None:
    """Print the fit for a reader."""
    console = Console()
    law = law_named(result.law)
    console.print(law.formula, highlight=False)
    console.print(
        f"status [bold]{result.status}[/bold] · {result.n_observations} observations · objective "
        f"{result.objective:.10g} · gradient {result.gradient_norm:.1e} · {result.agreement:.0%} of {result.n_starts} "
        "starts agree",
        highlight=False,
    )
    plain = result.unpenalised
    columns = ["parameter", "value", f"{result.level:.0%} interval", "note"]
    parameters = Table(*columns, *(["without penalty"] if plain is not None else []))
    for k, (name, value, interval) in enumerate(
        zip(law.parameter_names, result.parameters, result.intervals, strict=True)
    ):
        span = "-" if interval is None else f"{interval.low:.5g} .. {interval.high:.5g}"
        beside = [f"{plain.parameters[k]:.8g}"] if plain is not None else []
        parameters.add_row(name, f"{value:.8g}", span, _note(result, name), *beside)
    console.print(parameters)
    for label, scores in (("held out", result.holdout), ("without penalty", plain.holdout if plain else None)):
        if scores is not None:
            metrics = Table(label, "R2", "MAPE log LongPPL %", "MAPE LongPPL %", "bias (nats)")
            shown = [_number(scores.r2), _number(scores.mape_log), _number(scores.mape_ppl), f"{scores.bias:+.4g}"]
            metrics.add_row(str(scores.n_observations), *shown)
            console.print(metrics)
    for item in profiles:
        span = "-" if item.interval is None else f"{item.interval.low:.5g} .. {item.interval.high:.5g}"
        console.print(f"profile of {item.parameter}: {span}, for independent rows", highlight=False)
    if contenders:
        console.print(_comparison(contenders))
    for sentence in explain(result):
        console.print(f"  {sentence}", markup=False, highlight=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    by_reason: dict[str, list[str]] = {}
    for row in excluded:
        by_reason.setdefault(row.reason, []).append(str(row.row))
    for reason, rows in by_reason.items():
        console.print(f"left out {len(rows)} rows ({', '.join(rows)}): {reason}", markup=False, highlight=False)


def _comparison(contenders: Sequence[Contender]) -> Table:
    table = Table("contender", "k", "status", "BIC", "held out %", "of log %", "bias", "R2")
    for item in contenders:
        held = item.holdout
        scores = (None,) * 4 if held is None else (held.mape_ppl, held.mape_log, held.bias, held.r2)
        status = "-" if item.status is None else item.status.value
        numbers = [_number(value) for value in (item.bic, *scores)]
        table.add_row(item.name, str(item.n_parameters), status, *numbers)
    return table


def _note(result: Fit, name: str) -> str:
    if name in result.not_identifiable:
        return "not identifiable"
    if name in result.at_bound:
        return "at bound"
    if name in result.penalty.binds:
        return "held down by the penalty"
    if result.penalty.binds and name == law_named(result.law).parameter_names[-1]:
        return "not interpretable"
    return ""


def _scores(scores: Holdout | None) -> dict[str, object] | None:
    if scores is None:
        return None
    return {
        "n_observations": scores.n_observations,
        "r2": scores.r2,
        "mape_log": scores.mape_log,
        "mape_ppl": scores.mape_ppl,
        "bias": scores.bias,
    }


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
