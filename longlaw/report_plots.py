"""Figures of a report, drawn to be read at a width of 700 pixels and without telling red from green."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

_WIDTH_INCHES = 7.0
_MARKERS = "os^Dv<>P"
_GREY = "0.45"
_LABEL_GAP = 0.065
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": "0.92",
    "legend.frameon": False,
}

#: Points of one curve: D_l in tokens, and one value for each run.
Runs = Mapping[int, Sequence[float]]
#: Where a curve ends, its label and its colour.
_End = tuple[float, float, str, tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One row of `differences`: the mean with its standard error, and the single values behind it."""

    label: str
    mean: float
    error: float | None
    values: tuple[float, ...]


def over_long_tokens(panels: Mapping[str, Mapping[str, Runs]], *, what: str, zero: bool = False) -> Figure:
    """A panel for each title, in it a curve for each label through the means of its runs, every run a point.

    Args:
        panels: title -> label -> runs. Labels come in the order of size and keep their colour in all panels.
        what: the vertical axis, with its unit.
        zero: whether to draw the line of zero.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(panels))
        labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
        every: list[list[_End]] = []
        for panel, (title, curves) in zip(axes, panels.items(), strict=True):
            ends: list[_End] = []
            for label, runs in curves.items():
                colour, marker = _looks(labels, label)
                tokens = sorted(runs)
                means = [float(np.mean(runs[count])) for count in tokens]
                points = [(count, value) for count in tokens for value in runs[count]]
                panel.plot(tokens, means, color=colour, linewidth=1.4)
                panel.plot(*zip(*points, strict=True), marker, color=colour, markersize=4, fillstyle="none")
                ends.append((tokens[-1], means[-1], label, colour))
            if zero:
                panel.axhline(0, color=_GREY, linewidth=0.8)
            panel.set_title(title, loc="left")
            _token_axis(panel, sorted({count for runs in curves.values() for count in runs}))
            every.append(ends)
        _label_ends(axes, every)
        axes[0].set_ylabel(what)
        return figure


def medians(curves: Mapping[str, Runs], *, what: str, title: str) -> Figure:
    """A curve for each label through the medians of its runs, shaded from quartile to quartile."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 3.1), layout="constrained")
        axes = figure.subplots()
        ends = []
        for label, runs in curves.items():
            colour, marker = _looks(list(curves), label)
            tokens = sorted(runs)
            low, middle, high = np.array([np.quantile(runs[count], (0.25, 0.5, 0.75)) for count in tokens]).T
            axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(tokens, middle, marker, linestyle="-", color=colour, linewidth=1.4, markersize=4)
            ends.append((float(tokens[-1]), float(middle[-1]), label, colour))
        axes.set_title(title, loc="left")
        axes.set_ylabel(what)
        _token_axis(axes, sorted({count for runs in curves.values() for count in runs}))
        _label_ends([axes], [ends])
        return figure


def forecasts(panels: Mapping[str, Mapping[str, tuple[Runs, Runs]]], *, until_tokens: float, what: str) -> Figure:
    """Trajectories and the curves forecast for them: label -> (measured, predicted), a panel for each title."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _panels(len(panels))
        labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
        every: list[list[_End]] = []
        for panel, (title, curves) in zip(axes, panels.items(), strict=True):
            ends: list[_End] = []
            for label, (measured, predicted) in curves.items():
                colour, marker = _looks(labels, label)
                seen = sorted(measured)
                values = [float(np.mean(measured[count])) for count in seen]
                filled = "full", "none"
                for style, part in zip(filled, (True, False), strict=True):
                    chosen = [(x, y) for x, y in zip(seen, values, strict=True) if (x <= until_tokens) == part]
                    panel.plot(*zip(*chosen, strict=True), marker, color=colour, markersize=4.5, fillstyle=style)
                line = sorted(predicted)
                panel.plot(line, [float(np.mean(predicted[x])) for x in line], color=colour, linewidth=1.2)
                ends.append((seen[-1], values[-1], label, colour))
            panel.axvline(until_tokens, color=_GREY, linewidth=0.8, linestyle=":")
            panel.set_title(title, loc="left")
            _token_axis(panel, sorted({count for measured, _ in curves.values() for count in measured}))
            every.append(ends)
        _label_ends(axes, every)
        axes[0].set_ylabel(what)
        return figure


def law_quality(
    groups: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], noise: float | None
) -> Figure:
    """Left: predicted over measured. Right: predicted minus measured over D_l. A colour for each size.

    Args:
        groups: label -> measured and predicted log LongPPL and D_l, row by row.
        noise: standard deviation between repeated runs, shaded about zero; None where unknown.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2)
        every = np.concatenate([np.concatenate([measured, said]) for measured, said, _ in groups.values()])
        span = [float(every.min()), float(every.max())]
        left.plot(span, span, color=_GREY, linewidth=0.8)
        labels = list(groups)
        for place, (label, (measured, said, tokens)) in enumerate(groups.items()):
            colour, marker = _looks(labels, label)
            left.plot(measured, said, marker, color=colour, markersize=4, fillstyle="none")
            left.annotate(
                label, (0.04, 0.95 - 0.08 * place), xycoords="axes fraction", color=colour, va="top", fontweight="bold"
            )
            shift = 1.03 ** (place - (len(groups) - 1) / 2)  # beside one another, not on top
            missed = np.asarray(said) - np.asarray(measured)
            right.plot(np.asarray(tokens) * shift, missed, marker, color=colour, markersize=4, fillstyle="none")
        right.axhline(0, color=_GREY, linewidth=0.8)
        if noise is not None:
            right.axhspan(-noise, noise, color="0.85", zorder=0, linewidth=0)
        left.set(xlabel="measured log LongPPL (nats)", ylabel="predicted log LongPPL (nats)")
        left.set_title("The law against the measurements", loc="left")
        right.set_ylabel("predicted - measured (nats)")
        right.set_title("Residuals" + ("; grey: noise between long seeds" if noise is not None else ""), loc="left")
        _token_axis(right, sorted({int(count) for _, _, tokens in groups.values() for count in tokens}))
        return figure


def agreement(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], *, x: str, y: str) -> Figure:
    """Scatter about the line of equality: title -> label -> (x, y)."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 3.5), layout="constrained")
        axes = np.atleast_1d(figure.subplots(1, len(panels)))
        for panel, (title, groups) in zip(axes, panels.items(), strict=True):
            every = [value for pair in groups.values() for values in pair for value in values]
            span = [min(every), max(every)]
            panel.plot(span, span, color=_GREY, linewidth=0.8)
            for place, (label, (one, other)) in enumerate(groups.items()):
                colour, marker = _looks(list(groups), label)
                panel.plot(one, other, marker, color=colour, markersize=4.5, fillstyle="none")
                panel.annotate(
                    label,
                    (0.04, 0.96 - 0.08 * place),
                    xycoords="axes fraction",
                    color=colour,
                    va="top",
                    fontweight="bold",
                )
            panel.set_title(title, loc="left")
            panel.set(xlabel=x)
            panel.set_aspect("equal", adjustable="datalim")
        axes[0].set_ylabel(y)
        return figure


def differences(rows: Sequence[Spread], *, what: str) -> Figure:
    """A line for each row: mean with two standard errors to either side, single values as faint points."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 0.36 * len(rows) + 1.0), layout="constrained")
        axes = figure.subplots()
        for place, row in enumerate(rows):
            axes.plot(row.values, [place] * len(row.values), "o", color="0.7", markersize=4, fillstyle="none")
            error = None if row.error is None else 2 * row.error
            axes.errorbar(row.mean, place, xerr=error, fmt="D", color="#0072B2", markersize=5, linewidth=1.8, capsize=3)
        axes.axvline(0, color=_GREY, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(what)
        return figure


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Panels side by side with one vertical scale, in rows of three."""
    columns = min(count, 3)
    lines = -(-count // columns)
    figure = Figure(figsize=(_WIDTH_INCHES, 3.1 * lines), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns, sharey=True)).ravel().tolist()
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _looks(labels: Sequence[str], label: str) -> tuple[tuple[float, float, float, float], str]:
    """Colour and marker: lightness follows the order, so that it survives any eye and any printer."""
    place = labels.index(label)
    colour = matplotlib.colormaps["viridis"](0.72 * place / max(len(labels) - 1, 1))
    return colour, _MARKERS[place % len(_MARKERS)]


def _token_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """D_l on a logarithmic axis, with a tick at each value that has room for one."""
    axes.set_xscale("log")
    ticks: list[int] = []
    room = np.log(tokens[-1] / tokens[0]) / 5
    for count in reversed(tokens):
        if not ticks or np.log(ticks[-1] / count) >= room:
            ticks.append(count)
    unit, letter = next(((u, c) for u, c in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if tokens[0] >= u), (1.0, ""))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:.3g}{letter}"))
    axes.set_xlabel("D_l (tokens, log scale)")


def _label_ends(panels: Sequence[Axes], ends: Sequence[Sequence[_End]]) -> None:
    """Writes each label beside the end of its curve, pushed up where two would overlap; panels share their scale."""
    for axes in panels:
        axes.margins(x=0.06, y=0.08)
    for axes, labels in zip(panels, ends, strict=True):
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        free = low
        for x, y, label, colour in sorted(labels, key=lambda end: end[1]):
            at = max(y, free)
            free = at + _LABEL_GAP * (high - low)
            axes.text(x * (right / left) ** 0.03, at, label, color=colour, va="center", fontweight="bold", fontsize=8)
