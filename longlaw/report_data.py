"""What a report is made from: the measurements of some grids, by series, and what the grids were planned to cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.models import GridDetail
from api.models import Series as SeriesBody
from fitting.observations import Observations, observations_from_arrays
from longlaw.client import Client
from longlaw.errors import LonglawError


class Start(NamedTuple):
    """A short checkpoint: where trajectories begin. Sorts by size."""

    n_params: int
    scale: str
    short_tokens: int
    short_seed: int


class Trajectory(NamedTuple):
    """A start and the seed of what follows: one long stage, or under `linear_decay` one for each D_l."""

    start: Start
    long_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One model under one observation rule. Metrics are nats; None where no token qualified or nobody asked."""

    trajectory: Trajectory
    long_tokens: int
    log_longppl: float
    log_longppl_se: float | None
    log_shortppl: float | None
    key_gap: float | None
    key_count: int | None

    @property
    def start(self) -> Start:
        return self.trajectory.start

    @property
    def place(self) -> tuple[Trajectory, int]:
        """What two series are compared at."""
        return self.trajectory, self.long_tokens


Value = Callable[[Measurement], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeries:
    """What one fit may pool, as far as the report's grids measured it."""

    id: str
    protocol: str
    rule: str
    family: str
    evaluator_id: str
    measurements: tuple[Measurement, ...]

    @property
    def long_tokens(self) -> tuple[int, ...]:
        """Every D_l, ascending."""
        return tuple(sorted({item.long_tokens for item in self.measurements}))

    @property
    def starts(self) -> tuple[Start, ...]:
        """Every short checkpoint, by size."""
        return tuple(sorted({item.start for item in self.measurements}))

    def by_trajectory(self) -> Mapping[Trajectory, Sequence[Measurement]]:
        """Measurements of each trajectory in the order of D_l."""
        found: dict[Trajectory, list[Measurement]] = defaultdict(list)
        for item in sorted(self.measurements, key=lambda item: item.place):
            found[item.trajectory].append(item)
        return found

    @property
    def observations(self) -> Observations:
        """The rows that laws are fitted to; runs from one short checkpoint are one cluster."""
        return observations_of(self.measurements)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridFacts:
    """A grid as submitted, with what its cells would train one by one from nothing."""

    grid: GridDetail
    document: Mapping[str, Any]
    cells: int
    cells_measured: int
    cells_without_short: int
    evaluations: int
    tokens_independent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Grids and series of one report.

    Attributes:
        grids: in the order they were named.
        tokens_shared: what all grids train together from nothing, each stretch of training once.
        series: `main` first, then by protocol and rule.
    """

    grids: tuple[GridFacts, ...]
    tokens_shared: int
    series: tuple[MeasuredSeries, ...]

    @property
    def main(self) -> MeasuredSeries:
        """The series with the most measurements."""
        return self.series[0]

    @property
    def comparable(self) -> tuple[MeasuredSeries, ...]:
        """Series of the main one's recipe and evaluator."""
        ours = (self.main.family, self.main.evaluator_id)
        return tuple(series for series in self.series if (series.family, series.evaluator_id) == ours)


class NothingMeasuredError(LonglawError):
    """The grids have no measurement yet."""


def gather(client: Client, grid_ids: Sequence[str]) -> ReportData:
    """Reads grids, their plans and their measurements from the service.

    Raises:
        NothingMeasuredError: none of the grids has a measurement yet.
        ApiProblem: there is no such grid.
    """
    bodies = {series.id: series for series in client.series()}
    found: dict[str, dict[str, Measurement]] = defaultdict(dict)
    segments: dict[str, int] = {}
    grids = []
    for grid_id in dict.fromkeys(grid_ids):
        grid, document = client.grid(grid_id), client.document(grid_id)
        plan = client.plan(document)
        for segment in plan["segments_detail"]:
            tokens = segment["tokens_per_step"] * max(segment["save_steps"])
            segments[segment["id"]] = max(tokens, segments.get(segment["id"], 0))
        cells = list(client.cells(grid_id))
        for cell in cells:
            if cell.short_tokens is None:
                continue
            trajectory = Trajectory(
                Start(cell.n_params, cell.scale, cell.short_tokens, cell.short_seed), cell.long_seed
            )
            for evaluation in cell.evaluations:
                if evaluation.log_longppl is not None and cell.long_tokens > 0:
                    found[evaluation.series_id][evaluation.id] = Measurement(
                        trajectory=trajectory,
                        long_tokens=cell.long_tokens,
                        log_longppl=evaluation.log_longppl,
                        log_longppl_se=evaluation.log_longppl_se,
                        log_shortppl=evaluation.log_shortppl,
                        key_gap=evaluation.key_gap,
                        key_count=evaluation.key_count,
                    )
        grids.append(
            GridFacts(
                grid=grid,
                document=document,
                cells=len(cells),
                cells_measured=sum(cell.state == "MEASURED" for cell in cells),
                cells_without_short=sum(cell.short_tokens is None for cell in cells),
                evaluations=plan["evaluations"],
                tokens_independent=plan["tokens"]["independent"],
            )
        )
    if not found and any(facts.cells_measured and facts.cells_without_short for facts in grids):
        raise NothingMeasuredError(
            "A report needs D_s, which is unknown for all cells that are measured (short_tokens_seen). "
            "`GET /v1/observations` has their values, `longlaw fit --law trajectory` fits them."
        )
    if not found:
        raise NothingMeasuredError("None of these grids has a measurement yet: `longlaw grid watch ID` follows one.")
    return ReportData(grids=tuple(grids), tokens_shared=sum(segments.values()), series=_in_order(bodies, found))


def observations_of(measurements: Iterable[Measurement], value: Value = lambda item: item.log_longppl) -> Observations:
    """Rows for the fitting library, of those measurements that have the value."""
    rows = [(item, found) for item in measurements if (found := value(item)) is not None]
    return observations_from_arrays(
        [item.start.n_params for item, _ in rows],
        [item.start.short_tokens for item, _ in rows],
        [item.long_tokens for item, _ in rows],
        [found for _, found in rows],
        cluster=["/".join(map(str, item.start)) for item, _ in rows],
    )


def _in_order(
    bodies: Mapping[str, SeriesBody], found: Mapping[str, Mapping[str, Measurement]]
) -> tuple[MeasuredSeries, ...]:
    series = [
        MeasuredSeries(
            id=series_id,
            protocol=bodies[series_id].protocol,
            rule=bodies[series_id].rule,
            family=bodies[series_id].family,
            evaluator_id=bodies[series_id].evaluator_id,
            measurements=tuple(sorted(measurements.values(), key=lambda item: item.place)),
        )
        for series_id, measurements in found.items()
    ]
    series.sort(key=lambda item: (item.protocol, item.rule, item.id))
    main = max(series, key=lambda item: (len(item.measurements), item.protocol == "constant", item.rule != "raw"))
    return (main, *(item for item in series if item is not main))
