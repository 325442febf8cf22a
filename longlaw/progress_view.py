"""A grid's progress as a terminal shows it: a bar per scale, tokens per second, what waits and why."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.models import GridDetail, ScaleProgress

_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "RUNNING": "cyan"}
_SHOWN = 8


def progress_view(grid: GridDetail) -> RenderableType:
    """The whole state of a grid, to be printed or kept live."""
    parts: list[RenderableType] = [_title(grid), _bars(grid)]
    parts += _lines("waits", [f"{w.scale}: {w.count} {_plural(w.kind, w.count)} {w.why}" for w in grid.waiting])
    parts += _lines("failed", [f"{f.scale}: {f.count} {_plural(f.kind, f.count)}: {f.reason}" for f in grid.failures])
    return Group(*parts)


def progress_line(grid: GridDetail) -> str:
    """The same in one line, for a log."""
    done = f"{_share(grid.tokens_done, grid.tokens_total):.0%} of {grid.tokens_total:,} tokens"
    cells = f"{grid.cells.get('MEASURED', 0)}/{sum(grid.cells.values())} cells"
    rate = f", {grid.tokens_per_s:,.0f} tokens/s" if grid.tokens_per_s else ""
    return f"{grid.state} {done}, {cells}{rate}"


def _title(grid: GridDetail) -> Text:
    text = Text()
    text.append(grid.name, style="bold").append("  ").append(grid.state, style=_STYLES.get(grid.state, ""))
    text.append(f"  {grid.cells.get('MEASURED', 0)} of {sum(grid.cells.values())} cells measured")
    if grid.eta_s is not None:
        text.append(f", about {duration(grid.eta_s)} left")
    return text.append(f"\n{grid.id}", style="dim")


def _bars(grid: GridDetail) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(6):
        table.add_column(no_wrap=True)
    for scale in grid.scales:
        running = [attempt.what for attempt in grid.attempts if attempt.scale == scale.scale]
        measured = scale.evaluations.get("SUCCEEDED", 0)
        table.add_row(
            scale.scale,
            ProgressBar(total=max(scale.tokens_total, 1), completed=scale.tokens_done, width=30),
            f"{_share(scale.tokens_done, scale.tokens_total):4.0%} of {_tokens(scale.tokens_total)}",
            f"{scale.tokens_per_s:,.0f} tokens/s" if scale.tokens_per_s else "",
            f"{measured}/{sum(scale.evaluations.values())} evaluated",
            _activity(scale, running),
        )
    return table


def _activity(scale: ScaleProgress, running: list[str]) -> Text:
    if running:
        return Text(", ".join(running), style="cyan")
    return Text("done", style="green") if scale.tokens_done == scale.tokens_total else Text("waits", style="dim")


def _lines(title: str, lines: list[str]) -> list[Text]:
    shown = [Text(f"{title}  {line}", style="dim") for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(Text(f"{title}  and {len(lines) - _SHOWN} more", style="dim"))
    return shown


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


def _tokens(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
