"""Figures: they show what they are given."""

from pathlib import Path

import numpy as np
import pytest

from fitting import plots
from fitting.compare import compare
from fitting.joint import fit
from fitting.laws import CHINCHILLA, LONG_CONTEXT
from fitting.profile import profile
from fitting.values import Residual
from tests.fitting.paper_grid import paper_grid
from tests.fitting.published import gemstones


def test_all_figures_of_a_fit_are_written(tmp_path: Path) -> None:
    rows, held = paper_grid("loss"), paper_grid("loss", held_out=True)
    result = fit(LONG_CONTEXT, rows, bootstrap_draws=25, holdout=held)
    paths = plots.save(
        tmp_path / "figures",
        result,
        rows,
        holdout=held,
        profiles=[profile(LONG_CONTEXT, rows, "C")],
        contenders=compare(rows, held, laws=(LONG_CONTEXT,)),
    )
    assert [path.name for path in paths] == [
        "observed_predicted.png",
        "residuals.png",
        "curves.png",
        "profile_C.png",
        "variants.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_points_and_bands_are_those_of_the_fit() -> None:
    rows = paper_grid("loss")
    result = fit(LONG_CONTEXT, rows, bootstrap_draws=25)
    (points, diagonal) = plots.observed_predicted(result, rows).axes[0].lines
    assert np.asarray(points.get_xdata()).tolist() == rows.log_longppl.tolist()
    assert np.ptp(np.asarray(diagonal.get_xdata()) - np.asarray(diagonal.get_ydata())) == 0
    drawn = plots.curves(result, rows).axes[0]
    assert len(drawn.collections) == 6  # one band per curve
    without = plots.curves(fit(LONG_CONTEXT, rows, bootstrap_draws=0), rows).axes[0]
    assert len(without.collections) == 0


def test_one_stage_law_has_two_panels_of_residuals() -> None:
    rows = gemstones()
    result = fit(CHINCHILLA, rows, residual=Residual.LOG, huber_delta=1e-3, bootstrap_draws=0)
    assert [panel.get_xlabel() for panel in plots.residuals(result, rows).axes] == ["N", "D"]


def test_variants_without_held_out_rows_show_their_criterion() -> None:
    figure = plots.variants(compare(paper_grid("loss"), laws=(LONG_CONTEXT,)))
    assert figure.axes[0].get_xlabel() == "BIC"
    assert len(figure.axes[0].patches) == pytest.approx(4)
