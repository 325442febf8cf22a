"""Observation rules of the grid file: parameters that belong to them, their names in a series, the checkpoints read."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.cells import asked_cells
from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan_document import plan_document
from tests.orchestrator.small_grid import LONG_STEP, small_document, small_plan
from workers.spec import ObservationRule

EVERY_2_STEPS = {"spacing": 2 * LONG_STEP}


def refused(rule: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(GridError) as caught:
        asked_cells(parse_grid(small_document(rules=[rule], product_scales=["a"])))
    return {problem.pointer: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("rule", "pointer", "message"),
    [
        ({"name": "raw", "decay": 0.9}, "decay", "raw has no decay; decay belongs to ema"),
        ({"name": "raw", "spacing": 32}, "spacing", "raw has no spacing; spacing belongs to last_m, one_sqrt, ema"),
        ({"name": "last_m", "density": 0.5, **EVERY_2_STEPS}, "density", "density belongs to dare, ties"),
        ({"name": "one_sqrt", "decay": 0.5, **EVERY_2_STEPS}, "decay", "one_sqrt has no decay; decay belongs to ema"),
        ({"name": "one_sqrt"}, "spacing", "one_sqrt needs the tokens between its checkpoints"),
        ({"name": "one_sqrt", "m": 2, **EVERY_2_STEPS}, "m", "one_sqrt needs at least 3"),
        ({"name": "ema", **EVERY_2_STEPS}, "decay", "ema needs the factor by which"),
        ({"name": "ema", "decay": 1, **EVERY_2_STEPS}, "decay", "must be below 1, not 1"),
        ({"name": "ema", "decay": 0, **EVERY_2_STEPS}, "decay", "must be above 0, not 0"),
        ({"name": "ema", "decay": 0.9, "density": 0.5, **EVERY_2_STEPS}, "density", "ema has no density"),
        ({"name": "dare", **EVERY_2_STEPS}, "density", "dare needs the share of coordinates that it keeps"),
        ({"name": "ties", "density": 0, **EVERY_2_STEPS}, "density", "must be above 0, not 0"),
        ({"name": "ties", "density": 1.5, **EVERY_2_STEPS}, "density", "must be at most 1, not 1.5"),
    ],
)
def test_a_parameter_that_is_missing_or_does_not_belong_to_the_rule_is_refused_where_it_stands(
    rule: dict[str, Any], pointer: str, message: str
) -> None:
    assert message in refused(rule)[f"/rules/0/{pointer}"]


def test_every_rule_is_named_with_all_its_parameters_and_counted_in_steps() -> None:
    rules = [
        {"name": "one_sqrt", **EVERY_2_STEPS},
        {"name": "ema", "decay": "0.9", **EVERY_2_STEPS},
        {"name": "ema", "decay": 0.5, "m": 3, **EVERY_2_STEPS},
        {"name": "dare", "density": 0.1, **EVERY_2_STEPS},
        {"name": "ties", "density": 0.5, **EVERY_2_STEPS},
    ]
    asked = asked_cells(parse_grid(small_document(rules=rules, product_scales=["a"])))
    assert asked.cells[0].rules == {
        "one_sqrt(spacing=32)": ObservationRule(name="one_sqrt", m=0, spacing_steps=2),
        "ema(spacing=32, decay=0.9)": ObservationRule(name="ema", m=0, spacing_steps=2, decay=0.9),
        "ema(m=3, spacing=32, decay=0.5)": ObservationRule(name="ema", m=3, spacing_steps=2, decay=0.5),
        "dare(spacing=32, density=0.1)": ObservationRule(name="dare", m=0, spacing_steps=2, density=0.1, seed=42),
        "ties(spacing=32, density=0.5)": ObservationRule(name="ties", m=0, spacing_steps=2, density=0.5),
    }


def test_rules_that_differ_in_one_parameter_are_series_of_their_own() -> None:
    rules = [{"name": "ema", "decay": decay, **EVERY_2_STEPS} for decay in (0.1, 0.5, 0.9)]
    assert len(small_plan(rules=rules).series) == 3


def test_a_plan_tells_each_rules_parameters() -> None:
    rules = [{"name": "raw"}, {"name": "ema", "decay": 0.9, **EVERY_2_STEPS}]
    document = plan_document(small_plan(rules=rules, product_scales=["a"]))
    shown = [evaluation["rule"] for evaluation in document["evaluations_detail"]]
    assert {"name": "raw", "m": 1, "spacing_steps": 0} in shown
    assert {"name": "ema", "m": 0, "spacing_steps": 2, "decay": 0.9} in shown


def test_the_pool_is_every_spacing_back_from_the_cell_and_ends_before_the_short_stage() -> None:
    """D_l of 10 and 20 steps, spacing 3: what a cell reads depends on its own budget alone."""
    planned = small_plan(rules=[{"name": "ema", "decay": 0.9, "spacing": 3 * LONG_STEP}], product_scales=["a"])
    read = {evaluation.snapshot.step: [ref.step for ref in evaluation.sources] for evaluation in planned.evaluations}
    assert read == {10: [1, 4, 7, 10], 20: [2, 5, 8, 11, 14, 17, 20]}
    assert all(len({ref.segment for ref in evaluation.sources}) == 1 for evaluation in planned.evaluations)


def test_a_pool_that_would_leave_only_the_raw_checkpoint_is_refused() -> None:
    wide = {"spacing": 10 * LONG_STEP}
    message = refused({"name": "ema", "decay": 0.9, **wide})["/long_tokens/0"]
    assert "finds 1 of the 2 checkpoints it needs, 10 steps apart back from step 10" in message
    assert set(refused({"name": "one_sqrt", **wide})) == {"/long_tokens/0", "/long_tokens/1"}
    oldest = refused({"name": "dare", "density": 0.5, "m": 6, **EVERY_2_STEPS})["/long_tokens/0"]
    assert "reads 6 checkpoints 2 steps apart up to step 10: the oldest would lie at step 0" in oldest


def test_no_merged_model_joins_the_series_of_raw_ones() -> None:
    pooled = {"name": "last_m", "m": 2, "pool": "raw", **EVERY_2_STEPS}
    assert "choose another name" in refused(pooled)["/rules/0/pool"]
    assert small_plan(rules=[{"name": "raw", "pool": "raw"}]).series == small_plan().series
