"""What the law says of the measurements: the fit, other forms on held-out rows, and forecasts of trajectories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.compare import Contender, compare
from fitting.errors import FittingError
from fitting.explain import explain
from fitting.holdout import score
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT, TRAJECTORY, VARIANTS, law_named
from fitting.observations import Observations
from fitting.predict import law_values
from fitting.trajectory import forecast
from fitting.values import Fit, FloatArray, Holdout, Interval, Reference
from longlaw import report_plots as plots
from longlaw.report_data import MeasuredSeries, Measurement, Trajectory, observations_of
from longlaw.report_measured import noise_of
from longlaw.report_page import Block, Picture, Reading, Section, Table, absent, nats, percent, share, signed

_CURVE_POINTS = 40
_LEVEL = 0.9
_LAWS = {law.name for law in VARIANTS}


def the_law(series: MeasuredSeries, *, bootstrap_draws: int = 200) -> Section:
    """The law fitted to all measurements of the series, with intervals and residuals."""
    title = "The law, fitted to everything"
    rows = series.observations
    try:
        result = fit(LONG_CONTEXT, rows, bootstrap_draws=bootstrap_draws)
    except FittingError as error:
        return absent(title, f"the law cannot be fitted: {error}.")
    noise = noise_of(series)
    predicted = law_values(LONG_CONTEXT, result.parameters, *rows.sizes.T)
    missed = predicted - rows.log_longppl
    scales = [item.start.scale for item in series.measurements]
    groups = {
        scale: (rows.log_longppl[here].tolist(), predicted[here].tolist(), rows.long_tokens[here].tolist())
        for scale in dict.fromkeys(scales)
        for here in [np.array([other == scale for other in scales])]
    }
    picture = Picture(
        name="law",
        figure=plots.law_quality(groups, None if noise is None else noise.total),
        shows="Left, predicted against measured log LongPPL about the line of equality; right, residuals over D_l",
    )
    sentences = [*explain(result)[:-1], *_of_offset(result)]  # the last is on held-out rows, as is the next section
    if noise is not None and result.residual_std is not None:
        sentences.append(
            f"The residuals' standard deviation is {nats(result.residual_std)} nats, that between long seeds "
            f"{nats(noise.total)}: {result.residual_std / noise.total:.1f} times as much. Short checkpoints differ "
            "too, so not all of the excess need be the form of the law."
        )
    sentences.append(_of_residuals(series.measurements, missed))
    sentences += [f"Warning: {warning}." for warning in result.warnings]
    intro = (
        f"`{LONG_CONTEXT.formula}`, fitted to {result.n_observations} measurements from {result.n_clusters} short "
        f"checkpoints: {result.status.value}. R² {_plain(result.r2)}, mean error {percent(result.mape_log)} "
        "of log LongPPL, on the rows it was fitted to."
    )
    blocks: tuple[Block, ...] = (intro, _parameters(result), picture, Reading(sentences=tuple(sentences)))
    return Section(title=title, blocks=blocks)


def forms(series: MeasuredSeries) -> Section:
    """Forms of the law and predictions without any, on two sets of held-out rows."""
    title = "Which form predicts what it has not seen"
    rows = series.observations
    blocks: list[Block] = [
        "Every form is fitted to the same rows with the same loss and no penalty, and judged on rows kept apart, in "
        "the order of its error in LongPPL. Three contenders are no laws: the mean, the nearest measurement, and a "
        "plane in the logarithms of the sizes."
    ]
    winners: dict[str, str] = {}
    for what, values in (("largest D_l", rows.long_tokens), ("largest N", rows.n_params)):
        held = values == values.max()
        if held.all():
            blocks.append(f"*Held out, {what}: left out, because there is only one.*")
            continue
        try:
            contenders = compare(rows.subset(~held), rows.subset(held))
        except FittingError as error:
            blocks.append(f"*Held out, {what}: left out, because {error}.*")
            continue
        fitted = np.unique(values[~held])
        blocks += [
            f"**Held out: {what}** ({values.max():,.0f}; {held.sum()} rows held out, {(~held).sum()} fitted, "
            f"{len(fitted)} smaller values among them).",
            _contenders(contenders),
            Reading(sentences=tuple(_of_contenders(contenders, what, len(fitted)))),
        ]
        winners[what] = contenders[0].name
    if not winners:
        return absent(title, "it takes two sizes or two D_l to hold the larger one out.")
    if len(winners) > 1:
        names = sorted(set(winners.values()))
        best = " and ".join(f"`{name}` on the {what}" for what, name in winners.items())
        said = f"`{names[0]}` is best on both." if len(names) == 1 else f"No contender is best on both: {best}."
        blocks.append(Reading(sentences=(said,)))
    return Section(title=title, blocks=tuple(blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """One trajectory's later measurements, and what was said of them from its beginning."""

    scale: str
    fitted: Fit
    law: Holdout
    guided: Holdout | None
    line: Holdout
    carried: Holdout
    last: float
    interval: Interval | None


def forecasts(series: MeasuredSeries) -> Section:
    """The law of one trajectory, fitted up to the middle D_l and judged on the rest."""
    title = "A trajectory forecast from its beginning"
    if series.protocol != "constant":
        return absent(title, "under linear decay every D_l is a run of its own, and none goes on.")
    tokens = series.long_tokens
    if len(tokens) < 4:
        return absent(title, "it takes four D_l: three for the parameters of a trajectory, one to judge.")
    until = tokens[len(tokens) // 2]
    trajectories = {
        key: items for key, items in series.by_trajectory().items() if {item.long_tokens for item in items} == {*tokens}
    }
    if not trajectories:
        return absent(title, "no trajectory was measured at every D_l.")
    found = _forecasts(trajectories, until)
    rows = [
        _forecast_row(scale, [item for item in found.values() if item.scale == scale])
        for scale in dict.fromkeys(start.scale for start in series.starts)
        if any(item.scale == scale for item in found.values())
    ]
    rows.append(_forecast_row("all", list(found.values())))
    table = Table(
        header=(
            "size",
            "trajectories",
            "law",
            "law, guided",
            "line in log D_l",
            "last value",
            "bias of the law (nats)",
        ),
        rows=tuple(rows),
    )
    picture = Picture(
        name="forecast",
        figure=plots.forecasts(_forecast_panels(trajectories, found), until_tokens=until, what="log LongPPL (nats)"),
        shows="Measurements and forecasts over D_l, one long seed; filled points were fitted, open ones forecast",
    )
    intro = (
        f"`{TRAJECTORY.formula.partition(',')[0]}` for each trajectory, fitted to D_l up to {until:,} and judged on "
        f"{', '.join(f'{count:,}' for count in tokens if count > until)}. Mean error of LongPPL in percent. *Guided*: "
        "a one-sided penalty (lambda 1) holds the exponent below the median of complete trajectories from other short "
        "checkpoints. *Line*: least squares on the same points. *Last value*: nothing changes any more."
    )
    sentences = _of_forecasts(list(found.values()), sum(count <= until for count in tokens))
    return Section(title=title, blocks=(intro, table, picture, Reading(sentences=tuple(sentences))))


def _parameters(result: Fit) -> Table:
    law = law_named(result.law)
    rows = []
    for k, (name, unit) in enumerate(zip(law.parameter_names, law.parameter_units, strict=True)):
        interval = result.intervals[k]
        span = "-" if interval is None else f"{interval.low:.4g} to {interval.high:.4g}"
        notes = ["at a bound"] * (name in result.at_bound) + ["not identifiable"] * (name in result.not_identifiable)
        rows.append((name, unit.replace("*", " "), ", ".join(notes), f"{result.parameters[k]:.5g}", span))
    header = ("parameter", "unit", "note", "value", f"{result.level:.0%} interval")
    return Table(header=header, rows=tuple(rows), labels=3)


def _of_offset(result: Fit) -> list[str]:
    interval = result.intervals[-1]
    if interval is None:
        return ["The offset C has no interval here: neither its size nor its sign is known."]
    if interval.low <= 0 <= interval.high:
        return ["The interval of the offset C holds zero: its sign is not known."]
    return [f"The interval of the offset C lies {'above' if interval.low > 0 else 'below'} zero."]


def _of_residuals(measurements: Sequence[Measurement], missed: FloatArray) -> str:
    """Where the law is off on average: the group of one size, D_s or D_l that it misses most."""
    groups: dict[str, list[float]] = {}
    for item, error in zip(measurements, missed.tolist(), strict=True):
        start = item.start
        names = (start.scale, f"D_s = {start.short_tokens:,}", f"D_l = {item.long_tokens:,}")
        for name in names:
            groups.setdefault(name, []).append(error)
    name, mean = max(((name, float(np.mean(errors))) for name, errors in groups.items()), key=lambda pair: abs(pair[1]))
    side = "above" if mean > 0 else "below"
    return (
        f"Of all groups that share a size, a D_s or a D_l, the law misses {name} most: on average it lies "
        f"{nats(abs(mean))} nats {side} the measurements."
    )


def _contenders(contenders: Sequence[Contender]) -> Table:
    rows = []
    for item in contenders:
        held = item.holdout
        status = "no law" if item.name not in _LAWS else "too few rows" if item.status is None else item.status.value
        scores = ("-",) * 4
        if held is not None:
            scores = (percent(held.mape_ppl), percent(held.mape_log), signed(held.bias), _plain(held.r2))
        rows.append((item.name, status, str(item.n_parameters), *scores, _plain(item.r2)))
    header = (
        "contender",
        "status",
        "parameters",
        "LongPPL off by",
        "log LongPPL off by",
        "bias (nats)",
        "R² held out",
        "R² fitted",
    )
    return Table(header=header, rows=tuple(rows), labels=2)


def _of_contenders(contenders: Sequence[Contender], what: str, n_smaller: int) -> list[str]:
    laws = [item for item in contenders if item.name in _LAWS and item.holdout is not None]
    naive = [item for item in contenders if item.name not in _LAWS and item.holdout is not None]
    sentences = []
    full = next((item for item in laws if item.name == LONG_CONTEXT.name), None)
    if full is not None and naive:
        better = [item.name for item in naive if _error(item) <= _error(full)]
        beaten = f"no better than {' and '.join(better)}" if better else "better than all three naive contenders"
        sentences.append(f"`{full.name}` comes {_ordinal(laws.index(full) + 1)} of {len(laws)} forms and is {beaten}.")
    training = [item.r2 for item in laws if item.r2 is not None]
    if training:
        closest = max((item for item in laws if item.r2 is not None), key=lambda item: item.r2 or 0.0)
        sentences.append(
            f"On the rows they were fitted to, the forms have an R² of {min(training):.3f} to {max(training):.3f}; the "
            f"one that fits best, `{closest.name}`, comes {_ordinal(laws.index(closest) + 1)} on the rows kept apart."
        )
    if n_smaller < 3:
        sentences.append(f"Below the {what} there are only {n_smaller} values: no exponent along it can be known.")
    biased = [item for item in laws if item.holdout is not None and item.holdout.bias > 0]
    if laws:
        sentences.append(f"{share(len(biased), len(laws), 'forms')} predict too high a LongPPL on average.")
    return sentences


def _error(item: Contender) -> float:
    return math.inf if item.holdout is None or item.holdout.mape_ppl is None else item.holdout.mape_ppl


def _ordinal(place: int) -> str:
    names = ("first", "second", "third", "fourth", "fifth", "sixth")
    return names[place - 1] if place <= len(names) else f"{place}th"


def _forecasts(trajectories: Mapping[Trajectory, Sequence[Measurement]], until: int) -> dict[Trajectory, _Forecast]:
    """Each trajectory forecast, guided by the exponents of those that began at other short checkpoints."""
    rows = {key: observations_of(items) for key, items in trajectories.items()}
    exponents = {}
    for key, whole in rows.items():
        complete = fit(TRAJECTORY, whole, bootstrap_draws=0)
        if not complete.at_bound and not complete.not_identifiable:
            exponents[key] = complete.parameters[1]
    found = {}
    for key, whole in rows.items():
        elsewhere = [other for at, other in rows.items() if at.start != key.start]
        plain = forecast(whole, until_tokens=until, others=elsewhere, level=_LEVEL)
        others = [value for other, value in exponents.items() if other.start != key.start]
        guided = None
        if others:
            reference = Reference(parameter="beta_l", value=float(np.median(others)), n_slices=len(others))
            guided = forecast(whole, until_tokens=until, penalty=1.0, reference=reference).later
        assert plain.later is not None
        assert plain.carried is not None
        found[key] = _Forecast(
            scale=key.start.scale,
            fitted=plain.fit,
            law=plain.later,
            guided=guided,
            line=_line(whole, until),
            carried=plain.carried,
            last=float(whole.log_longppl[np.argmax(whole.long_tokens)]),
            interval=plain.interval,
        )
    return found


def _line(rows: Observations, until: int) -> Holdout:
    """A straight line in log D_l through the same points, by least squares."""
    seen = rows.long_tokens <= until
    slope, level = np.polyfit(np.log(rows.long_tokens[seen]), rows.log_longppl[seen], 1)
    return score(slope * np.log(rows.long_tokens[~seen]) + level, rows.log_longppl[~seen])


def _forecast_row(label: str, found: Sequence[_Forecast]) -> tuple[str, ...]:
    def mean(scores: Sequence[Holdout | None]) -> str:
        known = [item.mape_ppl for item in scores if item is not None and item.mape_ppl is not None]
        return percent(float(np.mean(known))) if known and len(known) == len(scores) else "-"

    bias = float(np.mean([item.law.bias for item in found]))
    errors = (
        mean([item.law for item in found]),
        mean([item.guided for item in found]),
        mean([item.line for item in found]),
        mean([item.carried for item in found]),
    )
    return (label, str(len(found)), *errors, signed(bias))


def _of_forecasts(found: Sequence[_Forecast], n_seen: int) -> list[str]:
    def wins(one: Sequence[Holdout | None], other: Sequence[Holdout]) -> int:
        pairs = zip(one, other, strict=True)
        return sum(a is not None and (a.mape_ppl or math.inf) < (b.mape_ppl or math.inf) for a, b in pairs)

    law, guided = [item.law for item in found], [item.guided for item in found]
    line, carried = [item.line for item in found], [item.carried for item in found]
    what = "trajectories"
    sentences = [
        f"The law is closer than the last value in {share(wins(law, carried), len(found), what)}, and closer than a "
        f"line in {share(wins(law, line), len(found), what)}."
    ]
    if all(item is not None for item in guided):
        sentences.append(
            f"Guided by other trajectories it is closer than the last value in "
            f"{share(wins(guided, carried), len(found), what)}, than a line in "
            f"{share(wins(guided, line), len(found), what)}, and than by itself in "
            f"{share(wins(guided, law), len(found), what)}."
        )
    spans = [(item.last, item.interval) for item in found if item.interval is not None]
    if spans:
        held = sum(span.low <= last <= span.high for last, span in spans)
        width = float(np.median([span.high - span.low for _, span in spans]))
        sentences.append(
            f"A {100 * _LEVEL:.0f} % interval for the last measurement, from how far forecasts missed elsewhere (on "
            f"trajectories from other short checkpoints), holds it in {share(held, len(spans), what)}; it is "
            f"{nats(width)} nats wide in the median."
        )
    if n_seen == TRAJECTORY.n_parameters:
        sentences.append(
            f"{n_seen} points for {n_seen} parameters leave nothing to average over: the curve goes wherever their "
            "noise sends it."
        )
    bounded = sum(bool(item.fitted.at_bound) for item in found)
    if bounded:
        sentences.append(f"{share(bounded, len(found), 'fits')} ended with a parameter at a bound.")
    return sentences


def _forecast_panels(
    trajectories: Mapping[Trajectory, Sequence[Measurement]], found: Mapping[Trajectory, _Forecast]
) -> dict[str, dict[str, tuple[plots.Runs, plots.Runs]]]:
    """One long seed of every short checkpoint: measured points, and the law from the first D_l to the last."""
    panels: dict[str, dict[str, tuple[plots.Runs, plots.Runs]]] = {}
    seed = min(key.long_seed for key in trajectories)
    for key in sorted(trajectories, key=lambda key: (key.start.short_tokens, key)):
        if key.long_seed != seed:
            continue
        measured = {item.long_tokens: [item.log_longppl] for item in trajectories[key]}
        tokens = np.unique(np.geomspace(min(measured), max(measured), _CURVE_POINTS).round())
        curve = law_values(TRAJECTORY, found[key].fitted.parameters, key.start.n_params, key.start.short_tokens, tokens)
        predicted = {int(x): [y] for x, y in zip(tokens.tolist(), curve.tolist(), strict=True)}
        panels.setdefault(f"D_s = {key.start.short_tokens:,}", {})[key.start.scale] = (measured, predicted)
    return panels


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
