"""Probes in the grid file: where they look, what they cost, and that they rename nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan, PlannedEvaluation
from tests.orchestrator.tiny_grid import tiny_document
from workers.probe_spec import NeedleLoss, Passkey, PositionLoss, ProbeSet, RetrievalHeads, Ruler

CORPUS = "c" * 32
RUN = [
    {"kind": "position_loss"},
    {"kind": "passkey", "lengths": [64], "samples": 2},
    {"kind": "needle_loss", "lengths": [64, 128], "depths": [0, 0.5, 1]},
    {"kind": "retrieval_heads", "length": 64, "tracked": ["0.1"]},
    {"kind": "ruler", "length": 512, "tasks": ["vt", "cwe"], "samples": 3},
]


def planned(**probes: Any) -> Plan:
    document = tiny_document(CORPUS, widths=(16,), short_steps=(27,), long_steps=(8, 16))
    if probes:
        document["evaluation"]["probes"] = {"run": RUN} | probes
    return plan(parse_grid(document))


def probed(of: Plan) -> list[PlannedEvaluation]:
    return [evaluation for evaluation in of.evaluations if isinstance(evaluation.evaluator, ProbeSet)]


def test_largest_budget_of_each_trajectory_is_probed_by_default() -> None:
    (evaluation,) = probed(planned(at="largest"))
    assert (evaluation.snapshot.step, evaluation.asked) == (16, False)
    probe_set = evaluation.evaluator
    assert isinstance(probe_set, ProbeSet)
    assert [type(probe) for probe in probe_set.probes] == [PositionLoss, Passkey, NeedleLoss, RetrievalHeads, Ruler]
    assert probe_set.documents == planned().evaluator.documents


def test_every_cell_is_probed_on_request() -> None:
    assert [evaluation.snapshot.step for evaluation in probed(planned(at="cells"))] == [8, 16]


def test_probes_are_priced_and_change_no_other_identity() -> None:
    without, with_probes = planned(), planned(at="cells")
    others = [evaluation for evaluation in with_probes.evaluations if evaluation not in probed(with_probes)]
    assert [evaluation.key for evaluation in others] == [evaluation.key for evaluation in without.evaluations]
    assert with_probes.segments == without.segments
    assert with_probes.series == without.series
    (first, _) = probed(with_probes)
    assert isinstance(first.evaluator, ProbeSet)
    assert first.flops == first.evaluator.forward_tokens * first.shape.forward_flops_per_token(512)
    assert with_probes.evaluation_flops == without.evaluation_flops + 2 * first.flops


def test_documents_and_seed_are_part_of_what_is_measured() -> None:
    sets = {
        evaluation.evaluator.id
        for probes in ({"seed": 1}, {"seed": 2}, {"seed": 2, "documents": {"count": 1, "length": 32}})
        for evaluation in probed(planned(**probes))
    }
    assert len(sets) == 3


@pytest.mark.parametrize(
    ("probes", "pointer", "message"),
    [
        ({"run": []}, "/evaluation/probes/run", "must not be empty"),
        ({"run": [{"kind": "passkey"}]}, "/evaluation/probes/run/0/lengths", "required"),
        ({"run": [{"kind": "guess"}]}, "/evaluation/probes/run/0", "needs a kind: position_loss, passkey"),
        ({"run": [{"lengths": [64]}]}, "/evaluation/probes/run/0", "needs a kind"),
        ({"run": [{"kind": "passkey", "length": [64]}]}, "/evaluation/probes/run/0/length", "did you mean 'lengths'"),
        ({"at": "sometimes"}, "/evaluation/probes/at", "largest"),
        ({"run": [{"kind": "passkey", "lengths": [64], "depths": [2]}]}, "/evaluation/probes/run/0/depths/0", "1"),
        ({"run": [{"kind": "ruler", "length": 100}]}, "/evaluation/probes/run/0/length", "100 tokens leave"),
        ({"run": [{"kind": "ruler", "length": 4096}]}, "/evaluation/probes/run/0/qa_1", "needs a file of questions"),
    ],
)
def test_probe_that_cannot_be_is_a_problem_at_its_place(probes: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(GridError) as caught:
        planned(**probes)
    assert any(problem.pointer == pointer and message in problem.message for problem in caught.value.problems)
