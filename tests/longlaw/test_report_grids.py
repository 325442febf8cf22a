"""The grids of the miniature: what they ask for, and what the two have in common."""

from __future__ import annotations

from pathlib import Path

from orchestrator.grid import load_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan

GRIDS = Path(__file__).parents[2] / "grids"


def _planned(name: str) -> Plan:
    return plan(load_grid((GRIDS / f"{name}.yaml").read_text(), format="yaml"))


def test_miniature_trains_the_short_stage_of_both_protocols_once() -> None:
    constant, decayed = _planned("mini-reproduction"), _planned("mini-reproduction-linear-decay")
    # 4 scales x (trunk + 3 decays + 3 x 2 long stages), and 4 + 3 x 2 x 5 long stages of one scale
    assert (len(constant.cells), len(constant.segments)) == (4 * 3 * 5 * 2, 4 * 10)
    assert (len(decayed.cells), len(decayed.segments)) == (3 * 5 * 2, 4 + 30)
    assert len(constant.evaluations) == 120 + 7 * 30  # seven more rules on one scale
    assert constant.warnings == decayed.warnings == ()
    known = {segment.id: segment.segment.kind for segment in constant.segments}
    shared = [known[segment.id] for segment in decayed.segments if segment.id in known]
    assert sorted(shared) == ["short_decay"] * 3 + ["short_trunk"]


def test_miniature_measures_both_protocols_alike() -> None:
    constant, decayed = _planned("mini-reproduction"), _planned("mini-reproduction-linear-decay")
    assert {(series.family, series.evaluator) for series in (*constant.series, *decayed.series)} == {
        (constant.family, constant.series[0].evaluator)
    }
    places = [{(c.n_params, c.short_tokens, c.long_tokens, c.long_seed) for c in p.cells} for p in (constant, decayed)]
    assert places[1] < places[0]
