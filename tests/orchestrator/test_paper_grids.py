"""The paper's grids against token counts worked out by hand, in units of N, for one seed of each stage:

short stage: trunk 8/9 x 450 = 400, decays 10 + 20 + 30 + 40 + 50 = 150, together 550;
Linear-Decay: 5 x (10 + 20 + 30 + 40 + 50) = 750; Constant: 5 x 50 = 250 for each long seed;
independent: 25 cells of on average 270 + 30.
"""

import functools
from pathlib import Path

import pytest

from orchestrator.grid import load_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan, ScaleTotals

GRIDS = Path(__file__).parents[2] / "grids"
PAPER_N = {"S1": 31e6, "S2": 66e6, "S3": 126e6, "S4": 241e6, "S5": 821e6}


@functools.cache
def planned(name: str) -> Plan:
    return plan(load_grid((GRIDS / f"{name}.yaml").read_text(encoding="utf-8"), format="yaml"))


def totals(name: str, scale: str) -> ScaleTotals:
    return next(row for row in planned(name).per_scale if row.scale == scale)


@pytest.mark.parametrize("scale", ["S1", "S2", "S3", "S4"])
@pytest.mark.parametrize(
    ("name", "cells", "train", "independent"),
    [
        ("paper-linear-decay", 25, 550 + 750, 25 * 300),
        ("paper-constant", 75, 550 + 3 * 250, 3 * 25 * 300),
    ],
)
def test_small_scales_cost_what_the_paper_says(name: str, cells: int, train: int, independent: int, scale: str) -> None:
    row = totals(name, scale)
    assert row.cells == cells
    assert row.tokens_train == pytest.approx(train * row.n_params, rel=1e-3)
    assert row.tokens_independent == pytest.approx(independent * row.n_params, rel=1e-3)


def test_the_nine_cells_of_s5_under_linear_decay() -> None:
    """Short 550; long 10+20+30+40+50 on the diagonal and 50+40+20+10 off it: 270."""
    row = totals("paper-linear-decay", "S5")
    assert row.cells == 9
    assert row.tokens_train == pytest.approx(820 * row.n_params, rel=1e-3)
    assert row.tokens_independent == pytest.approx(2_700 * row.n_params, rel=1e-3)


def test_the_one_trajectory_of_s5_under_constant() -> None:
    """D_s = 450, then one long stage to 120, observed 24 times by four checkpoints 1N apart."""
    row = totals("paper-constant", "S5")
    assert row.cells == 24
    assert row.tokens_train == pytest.approx(570 * row.n_params, rel=1e-3)
    assert row.tokens_independent == pytest.approx((24 * 450 + 5 * 24 * 25 / 2) * row.n_params, rel=1e-3)
    (long,) = [s for s in planned("paper-constant").segments if s.scale == "S5" and s.segment.kind == "long_constant"]
    assert len(long.save_steps) == 4 * 24


@pytest.mark.parametrize("name", ["paper-linear-decay", "paper-constant"])
def test_shapes_are_near_the_papers_sizes(name: str) -> None:
    for row in planned(name).per_scale:
        assert row.n_params == pytest.approx(PAPER_N[row.scale], rel=5e-3)


@pytest.mark.parametrize("name", ["paper-linear-decay", "paper-constant"])
def test_totals_exceed_32_bits_and_operations_64_bits(name: str) -> None:
    """B19, B22."""
    whole = planned(name)
    assert whole.tokens_train == sum(row.tokens_train for row in whole.per_scale) > 2**32
    assert whole.flops > 6 * 31_000_000 * whole.tokens_train
    assert whole.flops > 2**63


def test_phases_and_follow_ups_cost_their_tokens_once() -> None:
    """Trunk 400, decays 10 + 30 + 50, three long stages of 50 and from each a raw and a merged extension of 5.

    Independent: 15 cells of on average 270 + 30, and six extensions of 5.
    """
    whole = planned("progressive-stages")
    for row in whole.per_scale:
        assert row.tokens_train == pytest.approx((490 + 150 + 30) * row.n_params, rel=1e-3)
        assert row.tokens_independent == pytest.approx((15 * 300 + 30) * row.n_params, rel=1e-3)
    longs = [s.segment.stage for s in whole.segments if s.segment.kind == "long_constant"]
    assert {stage.tokens_per_step for stage in longs} == {2**22}
    assert {(stage.seq_len, stage.rope_base) for stage in longs} == {
        (2**12, 1e4),
        (2**15, 1e6),
        (2**16, 1e6),
        (2**17, 5e6),
        (2**18, 1e7),
    }
    assert {stage.data.full_length_share for stage in longs} == {0.75}
    assert len(whole.evaluations) == len(whole.cells) + 3 * 3 * 2


@pytest.mark.parametrize(("name", "cells", "segments"), [("quickstart", 36, 21), ("tiny", 8, 10)])
def test_the_small_grids_plan(name: str, cells: int, segments: int) -> None:
    """quickstart: 3 scales x (1 trunk + 3 decays + 3 long); tiny: 2 scales x (1 + 2 + 2)."""
    whole = planned(name)
    assert (len(whole.cells), len(whole.segments), len(whole.evaluations)) == (cells, segments, cells)
    assert whole.warnings == ()
