"""What holds of every plan, on a grid with phases, a model from a folder, all rules, follow-ups and probes."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Known, Plan
from tests.orchestrator.grid_with_everything import document_with_everything
from tests.orchestrator.small_grid import known_after


def planned(document: dict[str, Any], known: Known | None = None) -> Plan:
    return plan(parse_grid(document), known)


def identities(made: Plan) -> tuple[set[str], set[str], set[str]]:
    """Of segments, evaluations and cells."""
    return (
        {segment.id for segment in made.segments},
        {evaluation.key for evaluation in made.evaluations},
        {cell.key for cell in made.cells},
    )


def tokens_by_hand(made: Plan) -> int:
    """Each segment trained once to the last step that something reads."""
    return sum(max(one.save_steps, default=0) * one.segment.stage.tokens_per_step for one in made.segments)


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "linear_decay"])
def test_tokens_are_those_of_the_segments_and_a_finished_grid_costs_none(constant: bool) -> None:
    document = document_with_everything(constant=constant)
    made = planned(document)
    assert made.tokens_train == tokens_by_hand(made) > 0
    again = planned(document, known_after(made))
    assert (again.tokens_train, again.train_flops, again.evaluation_flops) == (0, 0, 0)
    assert {cell.status for cell in again.cells} == {"reused"}


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "linear_decay"])
def test_the_order_of_every_list_but_the_phases_does_not_matter(constant: bool) -> None:
    document = document_with_everything(constant=constant)
    turned = document_with_everything(constant=constant)
    for key in ("rules", "cells", "follow_ups", "product_scales"):
        turned[key].reverse()
    for lists in (turned["short_tokens"], turned["long_tokens"], turned["seeds"]):
        for values in lists.values():
            values.reverse()
    one, other = planned(document), planned(turned)
    assert identities(one) == identities(other)
    assert (one.tokens_train, one.tokens_independent) == (other.tokens_train, other.tokens_independent)


@pytest.mark.parametrize("left_out", ["probes", "follow_ups", "rules", "diagnose_zero"])
def test_what_is_added_changes_no_identity_and_trains_only_itself(left_out: str) -> None:
    document = document_with_everything()
    less = document_with_everything()
    match left_out:
        case "rules":
            less["rules"] = less["rules"][:2]
        case "probes" | "diagnose_zero":
            del less["evaluation"][left_out]
        case _:
            del less[left_out]
    small, whole = planned(less), planned(document)
    for part, of_all in zip(identities(small), identities(whole), strict=True):
        assert part <= of_all
    extended = planned(document, known_after(small))
    assert extended.tokens_train == whole.tokens_train - small.tokens_train


def test_longer_budgets_train_on_from_the_last_phase_that_exists() -> None:
    document, less = document_with_everything(), document_with_everything()
    less["long_tokens"] = {"default": [160], "m": [160]}
    less["cells"] = document["cells"] = []
    extended = planned(document, known_after(planned(less)))
    longer = 2 * 2 * 160  # D_s x short seeds, from 160 to 320 tokens, at scale a
    follow_ups = 2 * 2 * 160  # the second begins at the largest D_l, which is a new one
    assert extended.tokens_train == longer + follow_ups
    assert {cell.status for cell in extended.cells} == {"reused", "extended"}
