"""Follow-up stages: from raw and merged models of cells, measured at their end, never fitted."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan, PlannedSegment
from tests.orchestrator.small_grid import LONG_STEP, known_after, small_document
from workers.spec import CheckpointRef, DataMix, ObservationRule

LAST_3 = {"name": "last_m", "m": 3, "spacing": 2 * LONG_STEP}
LONGER: dict[str, Any] = {
    "name": "longer",
    "from": {"name": "raw"},
    "tokens": 6 * 32,
    "seq_len": 32,
    "batch_sequences": 1,
    "rope_base": 5_000_000,
    "final_rate_ratio": 0.01,
}


def document(*follow_ups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return small_document(product_scales=["a"], follow_ups=list(follow_ups), **changes)


def planned_with(*follow_ups: dict[str, Any], **changes: Any) -> Plan:
    return plan(parse_grid(document(*follow_ups, **changes)))


def messages(*follow_ups: dict[str, Any], **changes: Any) -> dict[str, str]:
    with pytest.raises(GridError) as caught:
        planned_with(*follow_ups, **changes)
    return {problem.pointer: problem.message for problem in caught.value.problems}


def of_kind(planned: Plan, kind: str) -> list[PlannedSegment]:
    return [segment for segment in planned.segments if segment.segment.kind == kind]


def test_a_follow_up_goes_on_from_the_largest_budget_of_each_trajectory() -> None:
    planned = planned_with(LONGER)
    longs, follow_ups = of_kind(planned, "long_constant"), of_kind(planned, "follow_up")
    assert [s.segment.parent for s in follow_ups] == [CheckpointRef(segment=long.id, step=20) for long in longs]
    segment = follow_ups[0].segment
    assert (segment.parent_rule, segment.horizon_steps, segment.seed) == (None, 6, 0)
    assert follow_ups[0].save_steps == (6,)
    stage = segment.stage
    assert (stage.seq_len, stage.batch_sequences, stage.rope_base) == (32, 1, 5_000_000)
    assert stage.final_rate_ratio == 0.01
    assert stage.start_rate == parse_grid(document()).resolve("a").long.start_rate  # type: ignore[union-attr]
    assert stage.data == longs[0].segment.stage.data
    assert planned.tokens_train == planned_with().tokens_train + 2 * 6 * 32
    assert planned.tokens_independent == planned_with().tokens_independent + 2 * 6 * 32


def test_its_end_is_measured_and_belongs_to_no_series() -> None:
    planned = planned_with(LONGER)
    measured = [e for e in planned.evaluations if e.follow_up is not None]
    assert len(measured) == 2
    for evaluation, segment in zip(measured, of_kind(planned, "follow_up"), strict=True):
        assert evaluation.follow_up == "longer"
        assert (evaluation.snapshot.segment, evaluation.snapshot.step) == (segment.id, 6)
        assert evaluation.snapshot.rule == ObservationRule(name="raw")
        assert evaluation.long_tokens == 20 * LONG_STEP
        assert evaluation.rope_base == 5_000_000
        assert not evaluation.asked
        assert all(evaluation.key not in cell.evaluations for cell in planned.cells)
    assert planned.cells == planned_with().cells


def test_from_a_merged_model_it_reads_all_checkpoints_of_the_rule() -> None:
    planned = planned_with(LONGER | {"from": LAST_3, "at": [10 * LONG_STEP]})
    long, follow_up = of_kind(planned, "long_constant")[0], of_kind(planned, "follow_up")[0]
    assert follow_up.segment.parent == CheckpointRef(segment=long.id, step=10)
    assert follow_up.segment.parent_rule == ObservationRule(name="last_m", m=3, spacing_steps=2)
    assert follow_up.segment.start_sources == tuple(CheckpointRef(segment=long.id, step=step) for step in (6, 8, 10))
    assert long.save_steps == long.missing_steps == (6, 8, 10, 20)


def test_a_trained_follow_up_asks_for_none_of_its_sources_again() -> None:
    asked = [LONGER | {"from": LAST_3}]
    again = plan(parse_grid(document(*asked)), known_after(planned_with(*asked)))
    assert again.tokens_train == 0
    assert {e.state for e in again.evaluations} == {"evaluated"}


def test_raw_and_merged_starts_are_different_stages() -> None:
    planned = planned_with(LONGER, LONGER | {"name": "longer, merged", "from": LAST_3})
    assert len({s.id for s in of_kind(planned, "follow_up")}) == 4
    assert {e.follow_up for e in planned.evaluations} == {None, "longer", "longer, merged"}


def test_after_a_decay_it_goes_on_from_the_rate_that_was_reached() -> None:
    planned = planned_with(LONGER, protocol="linear_decay")
    start_rate = parse_grid(document()).resolve("a").long.start_rate
    assert {s.segment.stage.start_rate for s in of_kind(planned, "follow_up")} == {start_rate * 0.1}  # type: ignore[union-attr]
    assert len(of_kind(planned, "follow_up")) == 2  # one for each D_s, at its largest D_l


def test_it_may_be_measured_on_documents_of_its_own_length() -> None:
    evaluation = {"reference": {"kind": "copy"}, "documents": {"count": 3, "length": 32}}
    planned = planned_with(LONGER | {"evaluation": evaluation})
    assert [e.documents.length for e in planned.evaluators] == [16, 32]
    assert {e.evaluator.documents.length for e in planned.evaluations if e.follow_up} == {32}
    assert {series.evaluator for series in planned.series} == {planned.evaluator.id}
    assert planned.evaluator.documents.length == 16


def test_data_and_length_are_the_parents_unless_given() -> None:
    tuned = {"name": "sft", "from": {"name": "raw"}, "tokens": 4 * LONG_STEP, "corpus": "f" * 32, "split": "short"}
    (first, _) = of_kind(planned_with(tuned), "follow_up")
    stage = first.segment.stage
    assert (stage.data.corpus, stage.data.split) == ("f" * 32, "short")
    assert (stage.seq_len, stage.batch_sequences, stage.rope_base) == (16, 1, 100_000)
    packed = tuned | {"packing": "documents"}
    del packed["corpus"], packed["split"]
    data = of_kind(planned_with(packed), "follow_up")[0].segment.stage.data
    assert (data.packing, data.corpus) == ("documents", "0123456789abcdef0123456789abcdef")


def test_in_a_chain_of_phases_it_begins_in_the_last_one() -> None:
    made = document(LONGER)
    made["recipe"]["long"]["stages"] = [{"until": 8 * LONG_STEP, "seq_len": 8}, {"rope_base": 1e6}]
    planned = plan(parse_grid(made))
    second = [s for s in of_kind(planned, "long_constant") if s.segment.stage_offset_steps][0]  # noqa: RUF015
    assert of_kind(planned, "follow_up")[0].segment.parent == CheckpointRef(segment=second.id, step=12)


@pytest.mark.parametrize(
    ("changes", "pointer", "message"),
    [
        ({"at": [15 * LONG_STEP]}, "/follow_ups/0/at/0", "no cell has D_l = 240; its cells have 160, 320"),
        ({"from": LAST_3 | {"m": 6}, "at": [160]}, "/follow_ups/0/from", "the oldest would lie at step 0"),
        ({"from": LAST_3 | {"spacing": 33}}, "/follow_ups/0/from/spacing", "33 tokens become 32"),
        ({"tokens": 33}, "/follow_ups/0/tokens", "33 tokens become 32"),
        ({"seq_len": 12, "batch_sequences": None}, "/follow_ups/0/seq_len", "give batch_sequences"),
        ({"from": LAST_3, "optimizer_state": "carry"}, "/follow_ups/0/optimizer_state", "no optimizer state"),
        ({"scales": ["z"]}, "/follow_ups/0/scales/0", "no scale is named 'z'"),
        ({"rope": {"method": "ntk"}}, "/follow_ups/0", "give one of them"),
        ({"form": {}}, "/follow_ups/0/form", "did you mean 'from'?"),
    ],
)
def test_impossible_follow_ups_are_refused_where_they_stand(
    changes: dict[str, Any], pointer: str, message: str
) -> None:
    assert message in messages(LONGER | changes)[pointer]


def test_names_are_taken_once_and_merging_needs_a_constant_rate() -> None:
    assert "is taken" in messages(LONGER, LONGER)["/follow_ups/1/name"]
    found = messages(LONGER | {"from": LAST_3}, protocol="linear_decay")
    assert "needs protocol constant" in found["/follow_ups/0/from"]


def test_processes_take_whole_sequences_of_it_too() -> None:
    found = messages(LONGER, execution={"micro_batch_tokens": 16})
    assert "do not hold a sequence of 32" in found["/follow_ups/0"]


def test_a_grid_with_follow_ups_reads_back_the_same() -> None:
    grid = parse_grid(document(LONGER | {"from": LAST_3, "at": ["10N"]}))
    assert parse_grid(grid.model_dump(mode="json")) == grid


def test_a_pool_of_one_checkpoint_is_refused_here_too() -> None:
    ema = {"name": "ema", "decay": 0.5, "spacing": 20 * LONG_STEP}
    assert "finds 1 of the 2 checkpoints" in messages(LONGER | {"from": ema})["/follow_ups/0/from"]


def test_what_would_do_nothing_is_refused() -> None:
    assert "is the same as 'longer'" in messages(LONGER, LONGER | {"name": "again"})["/follow_ups/1"]
    assert "no cells to go on from" in messages(LONGER | {"scales": ["b"]})["/follow_ups/0/scales/0"]
    assert "empty" in messages(LONGER | {"scales": []})["/follow_ups/0/scales"]
    assert "all 6 steps" in messages(LONGER | {"warmup_steps": 7})["/follow_ups/0/warmup_steps"]
    evaluation = small_document()["evaluation"] | {"every": 32}
    assert "at its end alone" in messages(LONGER | {"evaluation": evaluation})["/follow_ups/0/evaluation"]


def test_one_stage_measured_in_two_ways_is_trained_once() -> None:
    evaluation = small_document()["evaluation"] | {"documents": {"count": 1, "length": 32}}
    planned = planned_with(LONGER, LONGER | {"name": "on long documents", "evaluation": evaluation})
    assert len(of_kind(planned, "follow_up")) == 2
    assert len([item for item in planned.evaluations if item.follow_up is not None]) == 4


def test_seeds_multiply_follow_ups_as_they_multiply_trajectories() -> None:
    planned = planned_with(LONGER, seeds={"short": [0, 1], "long": [0, 1, 2]})
    assert len(of_kind(planned, "follow_up")) == 2 * 2 * 3  # D_s x short seeds x long seeds, at the largest D_l


@pytest.mark.parametrize("rule", [{"name": "raw"}, LAST_3])
def test_the_same_data_go_on_where_the_long_stage_stood(rule: dict[str, Any]) -> None:
    """Other data, or another length of the same, begin at their beginning."""
    same = {"name": "same", "from": rule, "tokens": 4 * LONG_STEP, "rope_base": 5_000_000}
    other = {**same, "name": "other", "packing": "documents"}
    for follow_up, offset in ((same, 20), (other, 0), (LONGER, 0)):
        segment = of_kind(planned_with(follow_up), "follow_up")[0].segment
        assert segment.data_offset_sequences == offset
        assert [segment.first_sequence(step) for step in (0, 3)] == [offset, offset + 3]
        assert segment.stage_tokens(4) == 4 * segment.stage.tokens_per_step


def test_the_same_data_go_on_past_all_phases() -> None:
    phases = [{"until": 6 * LONG_STEP, "rope_base": 1e5}, {"rope_base": 2e5}]
    made = document({"name": "same", "from": {"name": "raw"}, "tokens": 4 * LONG_STEP})
    del made["recipe"]["long"]["rope_base"]
    made["recipe"]["long"]["stages"] = phases
    planned = plan(parse_grid(made))
    before = of_kind(planned, "long_constant")[1].segment
    segment = of_kind(planned, "follow_up")[0].segment
    assert (before.first_sequence(0), before.first_sequence(14)) == (6, 20)
    assert segment.first_sequence(0) == 20


def test_another_corpus_is_another_mixture_whose_documents_stay_apart() -> None:
    made = document({**LONGER, "corpus": "f" * 32})
    made["recipe"]["long"] |= {"packing": "documents", "full_length_share": 0.5, "copied_spans": 0.25}
    data = of_kind(plan(parse_grid(made)), "follow_up")[0].segment.stage.data
    assert data == DataMix(corpus="f" * 32, split="long", packing="documents")
