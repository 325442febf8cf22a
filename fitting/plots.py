"""Figures of a fit, with matplotlib (the extra ``longlaw[plots]``); each function returns one and shows nothing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fitting.compare import Contender
from fitting.laws import law_named
from fitting.observations import Observations
from fitting.predict import law_values, predict_all
from fitting.profile import Profile
from fitting.values import Fit, Point

_CURVES = 6
_POINTS = 60
_BEYOND = 4.0


def observed_predicted(fit: Fit, observations: Observations, holdout: Observations | None = None) -> Figure:
    """Predicted against measured losses, held-out rows apart."""
    figure, law = Figure(figsize=(5, 5), layout="constrained"), law_named(fit.law)
    axes = figure.subplots()
    low, high = np.inf, -np.inf
    for rows, label, marker in ((observations, "fitted", "o"), (holdout, "held out", "^")):
        if rows is None:
            continue
        predicted = law_values(law, fit.parameters, *rows.sizes.T)
        axes.plot(rows.log_longppl, predicted, marker, alpha=0.7, label=f"{label} ({len(rows)})")
        low = min(low, float(rows.log_longppl.min()), float(predicted.min()))
        high = max(high, float(rows.log_longppl.max()), float(predicted.max()))
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.set(xlabel="measured (nats)", ylabel="predicted (nats)", title=fit.law)
    axes.legend()
    return figure


def residuals(fit: Fit, observations: Observations) -> Figure:
    """Residuals over each size that the law depends on."""
    law = law_named(fit.law)
    figure = Figure(figsize=(4 * len(law.axes), 3.5), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(law.axes), sharey=True))
    missed = law_values(law, fit.parameters, *observations.sizes.T) - observations.log_longppl
    for panel, axis in zip(panels, law.axes, strict=True):
        panel.semilogx(observations.sizes[:, axis], missed, "o", alpha=0.7)
        panel.axhline(0, color="grey", linewidth=1)
        panel.set(xlabel=law.symbols[axis])
    panels[0].set(ylabel="predicted - measured (nats)")
    return figure


def curves(fit: Fit, observations: Observations, holdout: Observations | None = None) -> Figure:
    """The law over the tokens of its last stage, with confidence bands, for some of the measured (N, D_s).

    The curves go four times beyond the largest size fitted; the bands are those of the law, not of a measurement.
    """
    law = law_named(fit.law)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    parts = [rows for rows in (observations, holdout) if rows is not None]
    sizes, y = np.concatenate([rows.sizes for rows in parts]), np.concatenate([rows.log_longppl for rows in parts])
    starts = np.unique(sizes[:, :2], axis=0)
    shown = starts[np.unique(np.linspace(0, len(starts) - 1, min(_CURVES, len(starts))).round().astype(int))]
    tokens = np.geomspace(sizes[:, 2].min(), _BEYOND * sizes[:, 2].max(), _POINTS)
    for n_params, short_tokens in shown.tolist():
        points = [Point(n_params=n_params, short_tokens=short_tokens, long_tokens=d) for d in tokens.tolist()]
        said = predict_all(fit, points, level=fit.level)
        label = f"N {n_params:.3g}" + (f", {law.symbols[1]} {short_tokens:.3g}" if 1 in law.axes else "")
        (line,) = axes.semilogx(tokens, [item.value for item in said], label=label)
        spans = [item.interval for item in said]
        if all(span is not None for span in spans):
            low, high = [s.low for s in spans if s is not None], [s.high for s in spans if s is not None]
            axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        here = (sizes[:, 0] == n_params) & (sizes[:, 1] == short_tokens)
        axes.plot(sizes[here, 2], y[here], "o", color=line.get_color(), markersize=4)
    axes.axvline(fit.ranges.long_tokens.high, color="grey", linewidth=1, linestyle=":")
    axes.set(xlabel=law.symbols[2], ylabel="log LongPPL (nats)", title=f"{fit.law}: {fit.level:.0%} confidence")
    axes.legend(fontsize="small")
    return figure


def profile_curve(found: Profile) -> Figure:
    """The objective along one parameter, its threshold and the interval below it."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    near = found.objectives <= found.objectives.min() + 4 * (found.threshold - found.objectives.min())
    axes.plot(found.values[near], found.objectives[near], marker=".", markersize=3)
    axes.axhline(found.threshold, color="grey", linewidth=1, linestyle="--")
    if found.interval is not None:
        axes.axvspan(found.interval.low, found.interval.high, alpha=0.15)
    axes.set(xlabel=found.parameter, ylabel="objective")
    return figure


def variants(contenders: Sequence[Contender]) -> Figure:
    """Held-out error in LongPPL of each contender, or its BIC where nothing was held out."""
    held = any(item.holdout is not None for item in contenders)
    scored = [(c.name, (c.holdout.mape_ppl if c.holdout is not None else None) if held else c.bic) for c in contenders]
    shown = [(name, value) for name, value in scored if value is not None]
    figure = Figure(figsize=(7, 0.4 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in shown], [value for _, value in shown])
    if held:
        axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set(xlabel="held-out error of LongPPL (%)" if held else "BIC")
    return figure


def save(
    directory: Path,
    fit: Fit,
    observations: Observations,
    *,
    holdout: Observations | None = None,
    profiles: Sequence[Profile] = (),
    contenders: Sequence[Contender] = (),
) -> list[Path]:
    """Write all figures as PNG files into a directory, which is made; returns their paths."""
    figures = {
        "observed_predicted": observed_predicted(fit, observations, holdout),
        "residuals": residuals(fit, observations),
        "curves": curves(fit, observations, holdout),
    }
    figures |= {f"profile_{item.parameter}": profile_curve(item) for item in profiles}
    if contenders:
        figures["variants"] = variants(contenders)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=120)
    return paths
