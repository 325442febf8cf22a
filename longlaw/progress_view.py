"""A grid's progress as a terminal shows it: a bar per scale, tokens per second, what waits and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.models import GridDetail, ScaleProgress

_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}
_SHOWN = 8
_CHAIN = "waiting on the checkpoint"


def progress_view(grid: GridDetail) -> RenderableType:
    """The whole state of a grid, to be printed or kept live."""
    waits = [(item.scale, item.kind, item.why, item.count) for item in grid.waiting]
    failed = [(item.scale, item.kind, item.reason, item.count) for item in grid.failures]
    return Group(_title(grid), _bars(grid), *_lines("waits", waits), *_lines("failed", failed))


def progress_line(grid: GridDetail) -> str:
    """The same in one line, for a log."""
    done = f"{_share(grid.tokens_done, grid.tokens_total):.0%} of {grid.tokens_total:,} tokens"
    cells = f"{grid.cells.get('MEASURED', 0)}/{sum(grid.cells.values())} cells"
    rate = f", {grid.tokens_per_s:,.0f} tokens/s" if grid.tokens_per_s else ""
    return f"{grid.state}{', paused:' if grid.paused_at else ''} {done}, {cells}{rate}"


def _title(grid: GridDetail) -> Text:
    text = Text()
    text.append(grid.name, style="bold").append("  ").append(grid.state, style=_STYLES.get(grid.state, ""))
    if grid.paused_at is not None:
        text.append(", paused", style="yellow")
    text.append(f"  {grid.cells.get('MEASURED', 0)} of {sum(grid.cells.values())} cells measured")
    if grid.eta_s is not None and grid.paused_at is None:
        text.append(f", about {duration(grid.eta_s)} left")
    return text.append(f"\n{grid.id}", style="dim")


def _bars(grid: GridDetail) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    idle = "paused" if grid.paused_at else "waits" if grid.state in ("PENDING", "RUNNING") else grid.state.lower()
    for scale in grid.scales:
        running = [attempt.what for attempt in grid.attempts if attempt.scale == scale.scale]
        measured = scale.evaluations["SUCCEEDED"]
        table.add_row(
            scale.scale,
            ProgressBar(total=max(scale.tokens_total, 1), completed=scale.tokens_done, width=30),
            f"{_share(scale.tokens_done, scale.tokens_total):4.0%} of {short_count(scale.tokens_total)}",
            f"{scale.tokens_per_s:,.0f} tokens/s" if scale.tokens_per_s else "",
            f"{measured}/{sum(scale.evaluations.values())} evaluated",
            _activity(scale, running, idle),
        )
    return table


def _activity(scale: ScaleProgress, running: list[str], idle: str) -> Text:
    if running:
        return Text(", ".join(running), style="cyan")
    done = scale.tokens_done == scale.tokens_total and scale.evaluations["SUCCEEDED"] == sum(scale.evaluations.values())
    return Text("done", style="green") if done else Text(idle, style="dim")


def _lines(title: str, items: Sequence[tuple[str, str, str, int]]) -> list[Text]:
    """One line for each kind of work and reason, whatever its scale; what waits for its turn comes last."""
    scales: dict[tuple[str, str], list[str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for scale, kind, why, count in sorted(items, key=lambda item: item[2].startswith(_CHAIN)):
        why = why.removesuffix(f" of {scale}")
        scales.setdefault((kind, why), []).append(scale)
        counts[kind, why] += count
    lines = [
        Text(f"{title}  {count} {_plural(kind, count)} ({', '.join(scales[kind, why])}): {why}", style="dim")
        for (kind, why), count in counts.items()
    ]
    return lines[:_SHOWN] + [Text(f"{title}  and more", style="dim")] * (len(lines) > _SHOWN)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _plural(kind: str, count: int) -> str:
    return kind.lower() + ("s" if count != 1 else "")


def _share(done: int, total: int) -> float:
    return done / total if total else 1.0


def short_count(count: int) -> str:
    """Three digits and a unit."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
