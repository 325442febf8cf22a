"""Sub-phases of the long stage: borders in whole steps, one D_l and one decay through all of them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan, PlannedSegment
from tests.orchestrator.small_grid import LONG_STEP, known_after, small_document, small_plan
from workers.spec import CheckpointRef

#: Steps of 16 tokens: two sequences of 8 up to step 8, one of 16 up to step 14, one of 16 with another base after it.
STAGES: list[dict[str, Any]] = [
    {"until": 8 * LONG_STEP, "seq_len": 8, "rope_base": 50_000},
    {"until": 14 * LONG_STEP},
    {"rope_base": 900_000, "packing": "documents", "full_length_share": 0.75},
]


def document(stages: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    made = small_document(product_scales=["a"], **changes)
    made["recipe"]["long"]["stages"] = STAGES if stages is None else stages
    return made


def planned_with(stages: list[dict[str, Any]] | None = None, **changes: Any) -> Plan:
    return plan(parse_grid(document(stages, **changes)))


def longs(planned: Plan) -> list[PlannedSegment]:
    return [segment for segment in planned.segments if segment.segment.kind.startswith("long")]


def messages(stages: list[dict[str, Any]], **changes: Any) -> dict[str, str]:
    with pytest.raises(GridError) as caught:
        planned_with(stages, **changes)
    return {problem.pointer: problem.message for problem in caught.value.problems}


def test_each_phase_is_a_segment_that_begins_where_the_one_before_ends() -> None:
    planned = planned_with(short_tokens=[720], long_tokens=[20 * LONG_STEP])
    first, second, third = longs(planned)
    assert [segment.segment.stage_offset_steps for segment in (first, second, third)] == [0, 8, 14]
    assert second.segment.parent == CheckpointRef(segment=first.id, step=8)
    assert third.segment.parent == CheckpointRef(segment=second.id, step=6)
    assert [segment.save_steps for segment in (first, second, third)] == [(8,), (6,), (6,)]
    assert [segment.segment.stage_tokens(segment.save_steps[-1]) for segment in (first, second, third)] == [
        8 * LONG_STEP,
        14 * LONG_STEP,
        20 * LONG_STEP,
    ]
    stages = [segment.segment.stage for segment in (first, second, third)]
    assert [(stage.seq_len, stage.batch_sequences, stage.rope_base) for stage in stages] == [
        (8, 2, 50_000),
        (16, 1, 100_000),
        (16, 1, 900_000),
    ]
    assert [stage.tokens_per_step for stage in stages] == [LONG_STEP] * 3
    assert [stage.data.full_length_share for stage in stages] == [None, None, 0.75]


def test_phases_cost_the_tokens_of_one_long_stage() -> None:
    assert planned_with().tokens_train == small_plan(product_scales=["a"]).tokens_train


def test_cells_are_measured_in_the_phase_where_their_tokens_end_with_its_base() -> None:
    planned = planned_with(short_tokens=[720], long_tokens=[8 * LONG_STEP, 10 * LONG_STEP, 20 * LONG_STEP])
    first, second, third = longs(planned)
    measured = {e.long_tokens: e for e in planned.evaluations}
    assert [cell.long_tokens for cell in planned.cells] == [8 * LONG_STEP, 10 * LONG_STEP, 20 * LONG_STEP]
    for tokens, segment, step, base in (
        (8 * LONG_STEP, first, 8, 50_000),  # a border belongs to what ends there
        (10 * LONG_STEP, second, 2, 100_000),
        (20 * LONG_STEP, third, 6, 900_000),
    ):
        evaluation = measured[tokens]
        assert (evaluation.snapshot.segment, evaluation.snapshot.step) == (segment.id, step)
        assert evaluation.sources == (CheckpointRef(segment=segment.id, step=step),)
        assert evaluation.rope_base == base


def test_a_decay_runs_through_all_phases_to_one_horizon() -> None:
    planned = planned_with(protocol="linear_decay", short_tokens=[720], long_tokens=[10 * LONG_STEP, 20 * LONG_STEP])
    assert [(s.segment.horizon_steps, s.segment.stage_offset_steps, s.save_steps) for s in longs(planned)] == [
        (10, 0, (8,)),
        (10, 8, (2,)),
        (20, 0, (8,)),
        (20, 8, (6,)),
        (20, 14, (6,)),
    ]


def test_a_phase_that_no_cell_reaches_is_not_trained() -> None:
    assert len(longs(planned_with(short_tokens=[720], long_tokens=[8 * LONG_STEP]))) == 1


def test_the_first_phase_is_shared_with_a_grid_that_has_it_alone() -> None:
    alone = document([{"until": 8 * LONG_STEP, "seq_len": 8, "rope_base": 50_000}, {}])
    del alone["recipe"]["long"]["stages"]
    alone["recipe"]["long"] |= {"seq_len": 8, "batch_sequences": 2, "rope_base": 50_000}
    assert longs(plan(parse_grid(alone)))[0].id == longs(planned_with())[0].id


def test_only_the_first_phase_begins_with_a_fresh_optimizer() -> None:
    fresh = document()
    fresh["recipe"]["long"] |= {"optimizer_state": "fresh", "start_rate": 0.001}
    states = [phase.stage.optimizer_state for phase in parse_grid(fresh).resolve("a").phases]
    assert states == ["fresh", "carry", "carry"]


def test_extending_a_grid_goes_on_from_the_phase_that_exists() -> None:
    before = planned_with(short_tokens=[720], long_tokens=[10 * LONG_STEP])
    longer = plan(parse_grid(document(short_tokens=[720], long_tokens=[20 * LONG_STEP])), known_after(before))
    assert longer.tokens_train == 10 * LONG_STEP
    assert [segment.missing_steps for segment in longs(longer)] == [(), (6,), (6,)]
    assert longer.cells[0].reason == f"its long stage goes on from {10 * LONG_STEP:,} tokens"


def test_a_rule_never_reads_across_a_border() -> None:
    last_3 = {"name": "last_m", "m": 3, "spacing": 2 * LONG_STEP}
    planned = planned_with(short_tokens=[720], long_tokens=[8 * LONG_STEP, 20 * LONG_STEP], rules=[last_3])
    assert [segment.save_steps for segment in longs(planned)] == [(4, 6, 8), (6,), (2, 4, 6)]
    (problem,) = messages(STAGES, short_tokens=[720], long_tokens=[160], rules=[last_3]).items()
    assert problem[0] == "/long_tokens/0"
    assert "scale a, D_l = 160" in problem[1]
    assert "across the border of two phases at step 8" in problem[1]


def test_diagnostics_between_cells_leave_out_what_lies_across_a_border() -> None:
    made = document(short_tokens=[720], long_tokens=[320], rules=[{"name": "last_m", "m": 2, "spacing": 2 * LONG_STEP}])
    made["evaluation"]["every"] = LONG_STEP
    steps = sorted(e.long_tokens // LONG_STEP for e in plan(parse_grid(made)).evaluations)
    assert steps == [3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 17, 18, 19, 20]


@pytest.mark.parametrize(
    ("stages", "pointer", "message"),
    [
        ([{"until": 128}], "/recipe/long/stages", "at least 2"),
        ([{"until": 128}, {"until": 256}], "/recipe/long/stages/1/until", "the last phase is open"),
        ([{}, {}], "/recipe/long/stages/0/until", "is required"),
        ([{"until": 128}, {"until": 64}, {}], "/recipe/long/stages/1/until", "must lie above the phase before"),
        ([{"until": 130, "seq_len": 8}, {}], "/recipe/long/stages/0/until", "130 tokens become 128"),
        ([{"until": 128, "seq_len": 12}, {}], "/recipe/long/stages/0/seq_len", "a step takes 16 tokens"),
        ([{"until": 128, "batch_sequences": 2}, {}], "/recipe/long/stages/0/seq_len", "a step takes 16 tokens"),
        ([{"until": 128, "full_length_share": 0.5}, {}], "/recipe/long/stages/0", "needs packing: documents"),
    ],
)
def test_impossible_phases_are_refused_where_they_stand(
    stages: list[dict[str, Any]], pointer: str, message: str
) -> None:
    assert message in messages(stages)[pointer]


def test_every_phase_may_bring_the_base_that_the_stage_lacks() -> None:
    made = document([{"until": 128, "rope_base": 1e5}, {"rope": {"method": "abf", "base": 1e6}}])
    del made["recipe"]["long"]["rope_base"]
    assert [phase.stage.rope_base for phase in parse_grid(made).resolve("a").phases] == [1e5, 1e6]
    made["recipe"]["long"]["stages"][1] = {}
    with pytest.raises(GridError, match="/recipe/long/rope_base: is required"):
        parse_grid(made)
