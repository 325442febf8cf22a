"""What was run and what was measured: LongPPL, the use of distant context, and the noise between seeds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from longlaw import report_plots as plots
from longlaw.report_data import MeasuredSeries, Measurement, ReportData, Start, Value
from longlaw.report_page import Picture, Reading, Section, Table, absent, nats, share

_SHOWN_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Neighbours along one axis, all else equal.

    Attributes:
        count: pairs of neighbours.
        down: pairs whose value falls.
        largest_rise: of the others, in nats; None where all fall.
        where: the two measurements of that rise.
    """

    count: int
    down: int
    largest_rise: float | None
    where: tuple[Measurement, Measurement] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of one run about the mean of runs that differ in their long seed alone, in nats.

    Attributes:
        total: of single measurements.
        offset: of the part that a run keeps along all of D_l.
        along: of the rest; None with a single D_l.
        places: (short checkpoint, D_l) that were measured under several seeds.
    """

    total: float
    offset: float
    along: float | None
    places: int


def what_was_run(data: ReportData) -> Section:
    """Cells and tokens of each grid, against one run for each cell."""
    rows = []
    for facts in data.grids:
        asked = f"{facts.cells_measured:,} of {facts.cells:,}"
        row = (facts.grid.name, facts.grid.protocol, asked, f"{facts.evaluations:,}", f"{facts.tokens_independent:,}")
        rows.append(row)
    independent = sum(facts.tokens_independent for facts in data.grids)
    main = data.main
    sizes = {start.scale: start.n_params for start in main.starts}
    sentences = [
        f"From nothing, all of this trains {data.tokens_shared:,} tokens, because cells that begin alike share their "
        f"beginning. One run for each cell would take {independent:,}: {independent / data.tokens_shared:.1f} times as "
        "many.",
        "Sizes (N, weights without the embedding): " + ", ".join(f"{name} {n:,}" for name, n in sizes.items()) + ".",
        f"Unless something else is said, what follows is about the protocol `{main.protocol}` under the rule "
        f"`{main.rule}`: {len(main.measurements):,} measurements of {len(main.by_trajectory()):,} trajectories from "
        f"{len(main.starts):,} short checkpoints. Logarithms are natural, losses are in nats per token.",
    ]
    if unknown := sum(facts.cells_without_short for facts in data.grids):
        sentences.append(f"{unknown:,} cells began with a model whose D_s nobody knows; they are left out here.")
    missing = sum(facts.cells - facts.cells_measured for facts in data.grids)
    if missing:
        sentences.append(f"{missing:,} cells have no measurement; nothing below knows of them.")
    table = Table(
        header=("grid", "protocol", "cells measured", "evaluations", "tokens, cell by cell"), rows=tuple(rows), labels=2
    )
    return Section(title="What was run", blocks=(table, Reading(sentences=tuple(sentences))))


def longppl(series: MeasuredSeries) -> Section:
    """log LongPPL by (N, D_s) and D_l, every seed shown."""
    seeds = sorted({item.trajectory.long_seed for item in series.measurements})
    note = ""
    if len(seeds) > 1:
        shown = " / ".join(map(str, seeds)) if len(seeds) <= _SHOWN_SEEDS else "as mean (lowest to highest)"
        note = f", long seeds {shown}"
    axes: tuple[tuple[str, Callable[[Measurement], int], Callable[[Measurement], tuple[object, ...]]], ...] = (
        ("D_l", lambda item: item.long_tokens, lambda item: (item.trajectory,)),
        ("D_s", lambda item: item.start.short_tokens, lambda item: (*_but(item, "short_tokens"), item.long_tokens)),
        ("N", lambda item: item.start.n_params, lambda item: (*_but(item, "n_params", "scale"), item.long_tokens)),
    )
    sentences = []
    for name, size, same in axes:
        groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
        for item in series.measurements:
            groups[same(item)].append(item)
        found = steps([sorted(group, key=size) for group in groups.values()], lambda item: item.log_longppl)
        if found.count:
            sentences.append(_said(f"Along {name} LongPPL", found))
    falls = [
        items[0].log_longppl - items[-1].log_longppl for items in series.by_trajectory().values() if len(items) > 1
    ]
    if falls:
        sentences.append(
            f"From a trajectory's first D_l to its last it falls by {nats(median(falls))} nats in the median; the "
            f"trajectories range from {nats(min(falls))} to {nats(max(falls))}."
        )
    errors = [item.log_longppl_se for item in series.measurements if item.log_longppl_se is not None]
    if errors:
        sentences.append(
            f"The standard error of one value over the evaluation documents is {nats(median(errors))} in the median. "
            "All models read the same documents, so differences between them are known better than that, and the "
            "level of all together is not."
        )
    picture = Picture(
        name="longppl",
        figure=plots.over_long_tokens(_panels(series, lambda item: item.log_longppl), what="log LongPPL (nats)"),
        shows="log LongPPL over D_l, a panel for each D_s, a curve for each size, a point for each run",
    )
    intro = f"log LongPPL in nats{note}."
    table = _by_long_tokens(series, lambda item: item.log_longppl)
    return Section(title="LongPPL over D_l", blocks=(intro, table, picture, Reading(sentences=tuple(sentences))))


def distant_context(series: MeasuredSeries) -> Section:
    """The gap between local and full context on key tokens."""
    title = "Use of distant context"
    known = [item for item in series.measurements if item.key_gap is not None]
    if not known:
        return absent(title, "the grids did not measure key tokens under local context (`short_context_gap`).")
    found = steps(list(series.by_trajectory().values()), lambda item: None if item.key_gap is None else -item.key_gap)
    keys = sorted({item.key_count for item in known if item.key_count is not None})
    gaps: dict[int, list[float]] = defaultdict(list)
    for item in known:
        gaps[item.long_tokens].append(item.key_gap or 0.0)
    first, last = min(gaps), max(gaps)
    sentences = [
        f"The gap grows in {share(found.down, found.count, 'steps along D_l')}"
        + ("." if found.largest_rise is None else f"; the largest fall is {nats(found.largest_rise)} nats."),
        f"In the median it is {nats(median(gaps[first]))} nats at D_l = {first:,} and {nats(median(gaps[last]))} at "
        f"{last:,}.",
        "It compares two contexts of one model, so it moves only with what the model takes from beyond the local "
        "context; ordinary progress in language, which lowers both losses, largely cancels.",
    ]
    if keys:
        count = f"{keys[0]:,}" if len(keys) == 1 else f"{keys[0]:,} to {keys[-1]:,}"
        sentences.append(f"It is a mean over {count} key tokens.")
    picture = Picture(
        name="distant-context",
        figure=plots.over_long_tokens(
            _panels(series, lambda item: item.key_gap), what="gap on key tokens (nats)", zero=True
        ),
        shows="Loss of key tokens with local minus with full context over D_l, a panel for each D_s, a curve by size",
    )
    intro = (
        "Loss of key tokens when the model sees the local context only, minus their loss under the full context, in "
        "nats. Zero would mean that distant tokens do not help."
    )
    table = _by_long_tokens(series, lambda item: item.key_gap)
    return Section(title=title, blocks=(intro, table, picture, Reading(sentences=tuple(sentences))))


def noise_between_seeds(series: MeasuredSeries) -> Section:
    """How far runs differ that differ in their long seed alone."""
    title = "Noise between long seeds"
    overall = noise_of(series)
    if overall is None:
        return absent(title, "no cell was measured under more than one long seed.")
    rows = []
    for scale in dict.fromkeys(start.scale for start in series.starts):
        of_scale = noise_of(series, scale=scale)
        if of_scale is not None:
            rows.append(_noise_row(scale, of_scale))
    rows.append(_noise_row("all", overall))
    table = Table(header=("size", "places", "one run", "constant along D_l", "changing along D_l"), rows=tuple(rows))
    sentences = [
        f"A single measurement differs from the mean over seeds by {nats(overall.total)} nats "
        f"({100 * math.expm1(overall.total):.1f} % of LongPPL), as a standard deviation."
    ]
    if overall.along is not None:
        larger = "more" if overall.offset > overall.along else "less"
        sentences.append(
            f"The part that a run keeps along all of D_l is {larger} than the part that changes: "
            f"{nats(overall.offset)} against {nats(overall.along)} nats. Points of one trajectory are not independent."
        )
    short_seeds = len({start.short_seed for start in series.starts})
    if short_seeds == 1:
        sentences.append(
            "All short checkpoints come from one short seed: what another short seed would change is in none of these "
            "numbers, and in no interval on this page but through the spread between short checkpoints."
        )
    intro = "Standard deviation of log LongPPL about the mean of the runs that share a short checkpoint, in nats."
    return Section(title=title, blocks=(intro, table, Reading(sentences=tuple(sentences))))


def noise_of(series: MeasuredSeries, *, scale: str | None = None) -> Noise | None:
    """The noise between long seeds, of one scale or all; None where no place has two seeds.

    With r the deviation of a run from the mean over seeds at its place, and o the mean of r along D_l over the places
    that all seeds of a short checkpoint share: total^2 = sum r^2 / sum (seeds - 1), offset^2 = sum o^2 / sum
    (seeds - 1), along^2 = sum (r - o)^2 / sum (seeds - 1)(places - 1).
    """
    by_start: dict[Start, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for item in series.measurements:
        if scale is None or item.start.scale == scale:
            by_start[item.start][item.trajectory.long_seed][item.long_tokens] = item.log_longppl
    sums, degrees, places = np.zeros(3), np.zeros(3), 0
    for runs in by_start.values():
        shared = sorted(set.intersection(*(set(run) for run in runs.values())))
        if len(runs) < 2 or not shared:
            continue
        values = np.array([[run[tokens] for tokens in shared] for run in runs.values()])
        deviations = values - values.mean(axis=0)
        offsets = deviations.mean(axis=1, keepdims=True)
        free = len(runs) - 1
        sums += [(deviations**2).sum(), (offsets**2).sum(), ((deviations - offsets) ** 2).sum()]
        degrees += [free * len(shared), free, free * (len(shared) - 1)]
        places += len(shared)
    if not places:
        return None
    total, offset, along = (math.sqrt(s / d) if d else None for s, d in zip(sums, degrees, strict=True))
    assert total is not None
    assert offset is not None
    return Noise(total=total, offset=offset, along=along, places=places)


def steps(chains: Sequence[Sequence[Measurement]], value: Value) -> Steps:
    """Counts how often the value falls from one measurement to the next; those without a value end a pair."""
    count = down = 0
    rise: float | None = None
    where: tuple[Measurement, Measurement] | None = None
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            before, after = value(one), value(other)
            if before is None or after is None:
                continue
            count += 1
            if after < before:
                down += 1
            elif rise is None or after - before > rise:
                rise, where = after - before, (one, other)
    return Steps(count=count, down=down, largest_rise=rise, where=where)


def _but(item: Measurement, *left_out: str) -> tuple[object, ...]:
    """What a measurement's trajectory is, without some of it."""
    start = item.start._asdict()
    return (*(value for name, value in start.items() if name not in left_out), item.trajectory.long_seed)


def _said(subject: str, found: Steps) -> str:
    text = f"{subject} falls in {share(found.down, found.count, 'steps')}"
    if found.largest_rise is None or found.where is None:
        return text + "."
    one, other = found.where
    place = f"{_place(one)} to {_place(other)}, long seed {one.trajectory.long_seed}"
    return f"{text}; the largest rise is {nats(found.largest_rise)} nats, from {place}."


def _place(item: Measurement) -> str:
    return f"{item.start.scale} at D_s = {item.start.short_tokens:,}, D_l = {item.long_tokens:,}"


def _noise_row(label: str, noise: Noise) -> tuple[str, ...]:
    return (label, f"{noise.places:,}", nats(noise.total), nats(noise.offset), nats(noise.along))


def _by_long_tokens(series: MeasuredSeries, value: Value) -> Table:
    """A row for each short checkpoint, a column for each D_l, the values of all seeds in each field."""
    columns = series.long_tokens
    many = len({start.short_seed for start in series.starts}) > 1
    found: dict[tuple[Start, int], list[float]] = defaultdict(list)
    for item in series.measurements:
        if (shown := value(item)) is not None:
            found[item.start, item.long_tokens].append(shown)
    rows = []
    for start in series.starts:
        names = (start.scale, f"{start.short_tokens:,}", *((str(start.short_seed),) if many else ()))
        rows.append((*names, *(_seeds(found.get((start, tokens), [])) for tokens in columns)))
    names = ("size", "D_s", *(("short seed",) if many else ()))
    return Table(header=(*names, *(f"D_l {tokens:,}" for tokens in columns)), rows=tuple(rows), labels=1)


def _seeds(values: Sequence[float]) -> str:
    if len(values) <= _SHOWN_SEEDS:
        return " / ".join(nats(value) for value in values) or "-"
    return f"{nats(float(np.mean(values)))} ({nats(min(values))} to {nats(max(values))})"


def _panels(series: MeasuredSeries, value: Value) -> Mapping[str, Mapping[str, plots.Runs]]:
    panels: dict[str, dict[str, dict[int, list[float]]]] = {}
    for item in sorted(series.measurements, key=lambda item: (item.start.short_tokens, item.place)):
        if (shown := value(item)) is not None:
            curves = panels.setdefault(f"D_s = {item.start.short_tokens:,}", {})
            curves.setdefault(item.start.scale, {}).setdefault(item.long_tokens, []).append(shown)
    return panels
