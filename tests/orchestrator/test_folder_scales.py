"""Grids that continue a model from a folder: no short stage, a D_s that is given or unknown, the rest as on our own."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Plan
from tests.orchestrator.small_grid import LONG_STEP, SHORT_STEP, known_after, small_document
from workers.rope import ntk_base
from workers.spec import CheckpointRef, FolderModel

MODEL = {"digest": "d" * 64, "n_params": 1_000, "embedding_params": 600, "layers": 2, "width": 8, "vocab_size": 40}


def document(seen: object = "unknown", *, beside: bool = False, **changes: Any) -> dict[str, Any]:
    """A grid of one model from a folder, beside the shapes of the small document or alone."""
    made = small_document(**changes)
    released = {"model": dict(MODEL), "short_tokens_seen": seen}
    made["recipe"]["long"]["start_rate"] = 0.001
    if beside:
        made["scales"]["released"] = released
    else:
        made["scales"] = {"released": released}
        del made["short_tokens"], made["recipe"]["model"], made["recipe"]["short"]
    return made


def planned(*args: Any, **changes: Any) -> Plan:
    return plan(parse_grid(document(*args, **changes)))


def messages(made: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(GridError) as caught:
        plan(parse_grid(made))
    return {problem.pointer: problem.message for problem in caught.value.problems}


def test_the_long_stage_begins_at_the_folder() -> None:
    made = planned(seeds={"short": [0, 1, 2], "long": [0, 1]}, rules=[{"name": "last_m", "m": 2, "spacing": LONG_STEP}])
    assert [(s.segment.kind, s.segment.parent, s.segment.seed) for s in made.segments] == [
        ("long_constant", None, 0),
        ("long_constant", None, 1),
    ]
    segment = made.segments[0].segment
    assert segment.shape == FolderModel(**MODEL)  # type: ignore[arg-type]
    assert segment.stage.optimizer_state == "fresh"  # type: ignore[union-attr]
    assert made.segments[0].save_steps == (9, 10, 19, 20)
    assert made.tokens_train == made.tokens_independent - 2 * 10 * LONG_STEP == 2 * 20 * LONG_STEP
    assert made.warnings == ()


def test_one_model_has_one_short_stage_whose_tokens_may_be_unknown() -> None:
    unknown, known = planned("unknown"), planned("15e12")
    assert {(cell.short_tokens, cell.short_seed) for cell in unknown.cells} == {(None, 0)}
    assert {cell.short_tokens for cell in known.cells} == {15_000_000_000_000}
    assert {e.short_tokens for e in known.evaluations} == {15_000_000_000_000}
    assert {e.cluster for e in known.evaluations} == {f"model:{'d' * 64}"}
    assert [s.id for s in known.segments] == [s.id for s in unknown.segments]
    assert len(known.cells) == 2
    assert known.tokens_independent == 30 * LONG_STEP  # what the model has seen is spent


def test_beside_shapes_of_our_own_all_belong_to_one_series() -> None:
    made = planned(1_000_000, beside=True)
    assert len(made.series) == 1
    assert {cell.scale: cell.n_params for cell in made.cells}["released"] == 1_000
    assert sum(cell.scale == "released" for cell in made.cells) == 2
    (row,) = [totals for totals in made.per_scale if totals.scale == "released"]
    assert (row.tokens_train, row.tokens_independent) == (20 * LONG_STEP, 30 * LONG_STEP)


def test_budgets_may_be_multiples_of_the_models_n() -> None:
    made = planned(long_tokens=["1.6N", "3.2N"])
    assert [cell.long_tokens for cell in made.cells] == [1_600, 3_200]


def test_at_no_tokens_the_folder_itself_is_measured_with_the_new_base() -> None:
    made = document()
    made["evaluation"]["diagnose_zero"] = True
    (zero,) = [e for e in plan(parse_grid(made)).evaluations if e.long_tokens == 0]
    assert (zero.sources, zero.snapshot.step, zero.rope_base, zero.asked) == ((), 0, 100_000, False)


def test_a_grid_is_extended_from_where_it_stands() -> None:
    longer = plan(parse_grid(document(long_tokens=[40 * LONG_STEP])), known_after(planned()))
    assert longer.tokens_train == 20 * LONG_STEP
    assert longer.cells[0].reason == f"its long stage goes on from {20 * LONG_STEP:,} tokens"


def test_decays_and_phases_work_as_on_shapes() -> None:
    made = document(protocol="linear_decay")
    made["recipe"]["long"]["stages"] = [{"until": 8 * LONG_STEP, "seq_len": 8}, {"rope_base": 1e6}]
    segments = plan(parse_grid(made)).segments
    assert [(s.segment.parent is None, s.segment.horizon_steps, s.save_steps) for s in segments] == [
        (True, 10, (8,)),
        (False, 10, (2,)),
        (True, 20, (8,)),
        (False, 20, (12,)),
    ]
    assert segments[1].segment.parent == CheckpointRef(segment=segments[0].id, step=8)


def test_extensions_start_from_what_the_model_came_with() -> None:
    made = document()
    made["scales"]["released"]["model"] |= {"head_dim": 4, "rope_base": 500_000}
    made["scales"]["released"]["long"] = {"rope": {"method": "ntk", "factor": 4}}
    assert parse_grid(made).resolve("released").long.rope_base == ntk_base(500_000, 4, 4)
    made["scales"]["released"]["long"] = {"rope": {"method": "yarn", "original_length": 8}}
    yarn = parse_grid(made).resolve("released").long.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_positions) == (2.0, 8)
    made["scales"]["released"]["long"] = {"rope": {"method": "yarn"}}
    assert "original_length" in messages(made)["/scales/released/long/rope"]
    made["scales"]["released"] = document()["scales"]["released"] | {"long": {"rope": {"method": "ntk", "factor": 4}}}
    assert "needs base" in messages(made)["/scales/released/long/rope"]


def test_what_only_a_short_stage_could_give_is_refused() -> None:
    made = document()
    made["recipe"]["long"]["start_rate"] = "inherit"
    assert "a model from a folder has no rate" in messages(made)["/recipe/long/start_rate"]
    made = document(beside=True, short_tokens={"default": [90 * SHORT_STEP], "released": [90 * SHORT_STEP]})
    assert "its D_s is short_tokens_seen" in messages(made)["/short_tokens/released"]
    cells = [
        {"scale": "released", "short_tokens": 720, "long_tokens": 160},
        {"scale": "a", "long_tokens": 160},
        {"scale": "released", "long_tokens": 480},
    ]
    found = messages(document(beside=True, cells=cells))
    assert "its D_s is short_tokens_seen" in found["/cells/0/short_tokens"]
    assert found["/cells/1/short_tokens"] == "is required"
    assert "/cells/2/short_tokens" not in found


@pytest.mark.parametrize(
    ("path", "value", "pointer", "message"),
    [
        ("short_tokens_seen", 0, "/scales/released/short_tokens_seen", "must be above zero or unknown"),
        ("modell", {}, "/scales/released/modell", "did you mean 'model'?"),
        ("layers", 2, "/scales/released/layers", "valid keys are model, short_tokens_seen, long, execution"),
        ("model", MODEL | {"digest": "x"}, "/scales/released/model/digest", "pattern"),
        ("model", MODEL | {"n_parms": 1}, "/scales/released/model/n_parms", "did you mean 'n_params'?"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(path: str, value: object, pointer: str, message: str) -> None:
    made = document()
    made["scales"]["released"][path] = value
    assert message in messages(made)[pointer]


def test_shapes_need_the_parts_of_the_recipe_that_folders_do_not() -> None:
    made = document(beside=True)
    del made["recipe"]["model"]
    assert messages(made) == {"/recipe/model": "is required, with vocab_size"}


def test_a_scale_of_unknown_short_tokens_cannot_be_held_out() -> None:
    made = document(beside=True, fit={"holdout": "scale=released"})
    made["scales"]["released"]["short_tokens_seen"] = "unknown"
    assert "no fit can predict it" in messages(made)["/fit/holdout"]
    made["scales"]["released"]["short_tokens_seen"] = "15e12"
    assert plan(parse_grid(made)).cells
