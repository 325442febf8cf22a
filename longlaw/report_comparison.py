"""Measurements of the same cells side by side: two protocols, observation rules, LongPPL and ShortPPL."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from fitting.agreement import concordance
from fitting.errors import InvalidObservationsError
from fitting.joint import fit
from fitting.laws import TRAJECTORY
from fitting.trajectory import elasticity_ratio
from longlaw import report_plots as plots
from longlaw.report_data import MeasuredSeries, Measurement, ReportData, Trajectory, observations_of
from longlaw.report_page import Picture, Reading, Section, Table, absent, nats, share, signed

_RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """How a series differs from another on the cells that both measured, in log LongPPL.

    Attributes:
        by_place: the difference at each (trajectory, D_l).
        by_trajectory: its mean over D_l, for each trajectory.
    """

    by_place: Mapping[tuple[Trajectory, int], float]
    by_trajectory: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over trajectories."""
        return float(np.mean(self.by_trajectory))

    @property
    def error(self) -> float | None:
        """Standard error of that mean, from the spread of trajectories; None for a single one."""
        count = len(self.by_trajectory)
        return float(np.std(self.by_trajectory, ddof=1)) / math.sqrt(count) if count > 1 else None

    def at(self, long_tokens: int) -> float | None:
        """Mean over trajectories at one D_l."""
        values = [value for (_, tokens), value in self.by_place.items() if tokens == long_tokens]
        return float(np.mean(values)) if values else None


def paired(series: MeasuredSeries, other: MeasuredSeries) -> Paired | None:
    """log LongPPL of `series` minus that of `other`, cell by cell; None where they share none."""
    values = {item.place: item.log_longppl for item in other.measurements}
    found = {item.place: item.log_longppl - values[item.place] for item in series.measurements if item.place in values}
    if not found:
        return None
    means: dict[Trajectory, list[float]] = defaultdict(list)
    for (trajectory, _), difference in found.items():
        means[trajectory].append(difference)
    return Paired(by_place=found, by_trajectory=tuple(float(np.mean(values)) for values in means.values()))


def two_protocols(data: ReportData) -> Section:
    """Every rule of the constant protocol beside the end of linear decay, on their common cells."""
    title = "The two protocols on the same cells"
    decayed = [series for series in data.comparable if series.protocol == "linear_decay"]
    constant = [series for series in data.comparable if series.protocol == "constant"]
    if not decayed or not constant:
        return absent(title, "one recipe and evaluator were not measured under both protocols.")
    other = max(decayed, key=lambda series: len(series.measurements))
    rows, panels, sentences = [], {}, []
    for series in constant:
        difference = paired(series, other)
        if difference is None or len(difference.by_place) < 2:
            continue
        long, short = (_matched(series, other, value) for value in (_longppl, _shortppl))
        shifts = [abs(value) for value in difference.by_place.values()]
        row = (series.rule, str(len(shifts)), _concordance(*long), signed(difference.mean, difference.error))
        rows.append((*row, nats(max(shifts)), _concordance(*short)))
        if series is data.main or series.rule == _RAW:
            panels[series.rule] = _groups(series, other)
            sentences.append(_of_protocols(series.rule, difference))
    if not rows:
        return absent(title, "the two protocols have fewer than two cells in common.")
    table = Table(
        header=("rule", "cells", "CCC of LongPPL", "mean difference", "largest", "CCC of ShortPPL"), rows=tuple(rows)
    )
    picture = Picture(
        name="protocols",
        figure=plots.agreement(panels or {rows[0][0]: _groups(constant[0], other)}, x=_X, y=_Y),
        shows="log LongPPL under the constant protocol over that under linear decay, about the line of equality",
    )
    ccc = (
        "The coefficient rewards cells that differ among themselves: where LongPPL spans a wide range it comes near "
        "one though every cell is off by the mean difference. Read the two together."
    )
    intro = (
        "`constant` under each rule against the end of a `linear_decay` run of the same size, budgets and seeds. CCC "
        "is Lin's concordance coefficient of the perplexities. Differences are constant minus linear decay, of log "
        "LongPPL in nats, with the standard error over trajectories."
    )
    reading = Reading(sentences=(*sentences, ccc, _of_starts(data.main, other)))
    return Section(title=title, blocks=(intro, table, picture, reading))


def observation_rules(data: ReportData) -> Section:
    """Every rule against the newest checkpoint alone, on the same cells."""
    title = "Observation rules on the same cells"
    constant = [series for series in data.comparable if series.protocol == "constant"]
    raw = next((series for series in constant if series.rule == _RAW), None)
    if raw is None:
        return absent(title, "the newest checkpoint alone (`raw`) was not measured, so there is nothing to compare to.")
    compared = [
        (series, found) for series in constant if series is not raw and (found := paired(series, raw)) is not None
    ]
    if not compared:
        return absent(title, "no cell was measured under another rule beside `raw`.")
    compared.sort(key=lambda pair: pair[1].mean)
    columns = raw.long_tokens
    rows = [
        (
            series.rule,
            str(len(found.by_place)),
            str(len(found.by_trajectory)),
            signed(found.mean, found.error),
            *(signed(found.at(tokens)) for tokens in columns),
        )
        for series, found in compared
    ]
    table = Table(
        header=("rule", "cells", "trajectories", "mean ± SE", *(f"D_l {tokens:,}" for tokens in columns)),
        rows=tuple(rows),
    )
    spreads = [
        plots.Spread(label=series.rule, mean=found.mean, error=found.error, values=found.by_trajectory)
        for series, found in compared
    ]
    picture = Picture(
        name="rules",
        figure=plots.differences(spreads, what="log LongPPL minus that of raw (nats); diamonds: mean ± 2 SE"),
        shows="Difference of each rule from the newest checkpoint alone: a point by trajectory, mean and two errors",
    )
    sentences = [_of_rule(series.rule, found) for series, found in compared]
    sentences += _of_best([series for series, _ in compared])
    sentences += _of_spacings([series for series, _ in compared])
    sentences.append(_of_starts(raw, raw))
    intro = (
        "log LongPPL under each rule minus that of the newest checkpoint alone (`raw`), in nats, on the same "
        "trajectories. Below zero the rule is better. The mean is over trajectories, and so is its standard error."
    )
    return Section(title=title, blocks=(intro, table, picture, Reading(sentences=tuple(sentences))))


def against_shortppl(series: MeasuredSeries) -> Section:
    """The elasticity ratio of LongPPL and ShortPPL along the trajectories."""
    title = "LongPPL against ShortPPL"
    trajectories = [
        items
        for items in series.by_trajectory().values()
        if len(items) > TRAJECTORY.n_parameters and all(item.log_shortppl is not None for item in items)
    ]
    if not trajectories:
        return absent(title, "no trajectory has ShortPPL at four D_l or more.")
    smooth, secants = _elasticities(trajectories)
    tokens = sorted(smooth)
    rows = []
    for count in tokens:
        known, steep = _finite(value for _, value in smooth[count]), _finite(secants[count])
        middle = "{1:.2f} ({0:.2f} to {2:.2f})".format(*np.quantile(known, (0.25, 0.5, 0.75))) if known else "-"
        step = f"{median(steep):.2f}" if steep else "-"
        rows.append((f"{count:,}", str(len(smooth[count])), str(len(known)), middle, step))
    table = Table(
        header=("D_l", "trajectories", "ratio defined", "R, median (quartiles)", "R since the D_l before"),
        rows=tuple(rows),
    )
    curves: dict[str, dict[int, list[float]]] = {}
    for count in tokens:
        for scale, value in smooth[count]:
            if math.isfinite(value):
                curves.setdefault(scale, {}).setdefault(count, []).append(value)
    every = [value for pairs in smooth.values() for _, value in pairs]
    known = _finite(every)
    above = sum(value > 1 for value in known)
    sentences = [f"R is above one at {share(above, len(known), 'points where it is defined')}."]
    if len(known) < len(every):
        sentences.append(
            f"At {share(len(every) - len(known), len(every), 'points')} the fitted ShortPPL does not fall, and R means "
            "nothing."
        )
    ends = [_finite(value for _, value in smooth[count]) for count in (tokens[0], tokens[-1])]
    if all(ends) and len(tokens) > 1:
        first, last = (median(values) for values in ends)
        sentences.append(
            f"Its median {'falls' if last < first else 'rises'} from {first:.2f} at D_l = {tokens[0]:,} to {last:.2f} "
            f"at {tokens[-1]:,}."
        )
    sentences.append(
        "The last column needs no law: it is the fall of log LongPPL since the D_l before, over that of log ShortPPL. "
        "Where the two columns disagree, the curve is doing the talking."
    )
    blocks: list[str | Table | Picture | Reading] = [
        f"R(D_l) is the relative fall of LongPPL over that of ShortPPL for the same relative growth of D_l, from "
        f"`{TRAJECTORY.formula.partition(',')[0]}` fitted to both along each trajectory.",
        table,
    ]
    if curves:
        picture = Picture(
            name="elasticity",
            figure=plots.medians(
                curves, what="R (no unit)", title="Median over D_s and seeds, shaded between quartiles"
            ),
            shows="Elasticity ratio over D_l, a curve for each size through the medians, shaded between quartiles",
        )
        blocks.append(picture)
    return Section(title=title, blocks=(*blocks, Reading(sentences=tuple(sentences))))


_X = "linear decay, log LongPPL (nats)"
_Y = "constant, log LongPPL (nats)"


def _longppl(item: Measurement) -> float | None:
    return item.log_longppl


def _shortppl(item: Measurement) -> float | None:
    return item.log_shortppl


def _matched(
    series: MeasuredSeries, other: MeasuredSeries, value: Callable[[Measurement], float | None]
) -> tuple[list[float], list[float]]:
    """Perplexities of the cells that both have."""
    theirs = {item.place: value(item) for item in other.measurements}
    pairs = [(value(item), theirs.get(item.place)) for item in series.measurements]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [math.exp(a) for a, _ in known], [math.exp(b) for _, b in known]


def _concordance(one: Sequence[float], other: Sequence[float]) -> str:
    try:
        return f"{concordance(one, other):.3f}"
    except InvalidObservationsError:
        return "-"


def _groups(series: MeasuredSeries, other: MeasuredSeries) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the scatter, by D_s."""
    theirs = {item.place: item.log_longppl for item in other.measurements}
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for item in sorted(series.measurements, key=lambda item: (item.start.short_tokens, item.place)):
        if item.place in theirs:
            one, two = groups.setdefault(f"D_s = {item.start.short_tokens:,}", ([], []))
            one.append(theirs[item.place])
            two.append(item.log_longppl)
    return groups


def _of_protocols(rule: str, found: Paired) -> str:
    higher = sum(value > 0 for value in found.by_place.values())
    cells = share(higher, len(found.by_place), "cells")
    return f"`constant` under `{rule}` is higher than linear decay in {cells}; the mean difference is {_size(found)}."


def _of_rule(rule: str, found: Paired) -> str:
    lower = sum(value < 0 for value in found.by_place.values())
    cells = share(lower, len(found.by_place), "cells")
    return f"`{rule}` is lower than `raw` in {cells}; the mean difference is {_size(found)}."


def _size(found: Paired) -> str:
    """The mean difference, and whether it stands out from the spread of trajectories."""
    size = f"{signed(found.mean, found.error)} nats"
    if found.error is None:
        return f"{size}, from a single trajectory"
    return f"{size}, {'within' if abs(found.mean) <= 2 * found.error else 'beyond'} two standard errors of zero"


def _of_best(ranked: Sequence[MeasuredSeries]) -> list[str]:
    if len(ranked) < 2:
        return []
    found = paired(ranked[0], ranked[1])
    if found is None:
        return []
    return [f"The two lowest, `{ranked[0].rule}` and `{ranked[1].rule}`, differ by {_size(found)}."]


def _of_spacings(ranked: Sequence[MeasuredSeries]) -> list[str]:
    """Averages of as many checkpoints, nearer together or further apart."""
    averages = sorted((series for series in ranked if series.rule.startswith("last_m(")), key=lambda item: item.rule)
    sentences = []
    for place, one in enumerate(averages):
        for other in averages[place + 1 :]:
            same_m = one.rule.partition(",")[0] == other.rule.partition(",")[0]
            if same_m and (found := paired(one, other)) is not None:
                sentences.append(f"Spacing: `{one.rule}` minus `{other.rule}` is {_size(found)}.")
    return sentences


def _of_starts(series: MeasuredSeries, other: MeasuredSeries) -> str:
    """How many short checkpoints a standard error over trajectories really rests on."""
    trajectories = {item.trajectory for item in series.measurements} & {item.trajectory for item in other.measurements}
    starts = {trajectory.start for trajectory in trajectories}
    scales = sorted({start.scale for start in starts})
    return (
        f"These {len(trajectories)} trajectories come from {len(starts)} short checkpoints of {', '.join(scales)}: a "
        "standard error over them says little about other sizes."
    )


def _elasticities(
    trajectories: Sequence[Sequence[Measurement]],
) -> tuple[dict[int, list[tuple[str, float]]], dict[int, list[float]]]:
    """R by D_l: of the curves, with the size's name, and between neighbouring D_l; not finite where undefined."""
    smooth: dict[int, list[tuple[str, float]]] = defaultdict(list)
    secants: dict[int, list[float]] = defaultdict(list)
    for items in trajectories:
        of_long, of_short = (
            fit(TRAJECTORY, observations_of(items, value), bootstrap_draws=0) for value in (_longppl, _shortppl)
        )
        tokens = [item.long_tokens for item in items]
        for count, ratio in zip(tokens, elasticity_ratio(of_long, of_short, tokens).tolist(), strict=True):
            smooth[count].append((items[0].start.scale, ratio))
        for before, after in itertools.pairwise(items):
            fall = (before.log_shortppl or 0.0) - (after.log_shortppl or 0.0)
            gain = before.log_longppl - after.log_longppl
            secants[after.long_tokens].append(gain / fall if fall > 0 else math.nan)
    return smooth, secants


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
