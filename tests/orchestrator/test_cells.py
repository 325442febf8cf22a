from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cells import MAX_CELLS, asked_cells, decay_steps_for
from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from tests.orchestrator.small_grid import LONG_STEP, SHORT_STEP, small_document
from workers.spec import ObservationRule


def refused(**changes: Any) -> list[tuple[str, str]]:
    with pytest.raises(GridError) as caught:
        asked_cells(parse_grid(small_document(**changes)))
    return [(problem.pointer, problem.message) for problem in caught.value.problems]


def warned(**changes: Any) -> dict[str, str]:
    asked = asked_cells(parse_grid(small_document(**changes)))
    return {warning.pointer: warning.message for warning in asked.warnings}


def places(**changes: Any) -> list[tuple[int, int, int, int, int]]:
    cells = asked_cells(parse_grid(small_document(**changes))).cells
    return [
        (p.scale_index, p.short_steps, p.long_steps, p.short_seed, p.long_seed) for p in (cell.place for cell in cells)
    ]


def test_the_product_is_every_scale_with_every_budget_and_seed() -> None:
    found = places(seeds={"short": [1], "long": [0, 7]}, product_scales=["b"])
    assert found == [(1, d_s, d_l, 1, seed) for d_s in (90, 180) for d_l in (10, 20) for seed in (0, 7)]


def test_budgets_round_to_the_nearest_step() -> None:
    """90 steps and a little: 8 x 90 + 3 is nearer to 90 steps, 8 x 90 + 4 to 91 (half up)."""
    for extra, steps in ((3, 90), (4, 91), (-4, 90), (-5, 89)):
        assert places(short_tokens=[90 * SHORT_STEP + extra], long_tokens=[160], product_scales=["a"]) == [
            (0, steps, 10, 0, 0)
        ]


@given(st.integers(min_value=1, max_value=10**15))
def test_the_decay_is_the_nearest_integer_to_a_ninth(steps: int) -> None:
    assert abs(9 * decay_steps_for(steps) - steps) <= 4


def test_a_budget_of_less_than_one_step_is_refused() -> None:
    ((pointer, message),) = refused(long_tokens=[7, 160], product_scales=["a"])
    assert pointer == "/long_tokens/0"
    assert message == "scale a: 7 tokens are less than one step of 16; raise the budget or lower the batch"


def test_a_budget_that_rounding_moves_too_far_is_refused_for_every_scale() -> None:
    found = refused(short_tokens=[720, 90 * SHORT_STEP * 2 + 3], rounding_tolerance=0.002)
    assert [pointer for pointer, _ in found] == ["/short_tokens/1", "/short_tokens/1"]
    assert found[0][1] == (
        "scale a: 1,443 tokens become 1,440 in whole steps of 8, off by 0.21%; "
        "rounding_tolerance is 0.20%: choose a multiple of 8 or a smaller batch"
    )
    assert found[1][1].startswith("scale b: ")


def test_a_budget_beyond_64_bits_is_refused() -> None:
    """B22."""
    ((_, message),) = refused(short_tokens=["1e17N"], product_scales=["a"])
    assert "do not fit in 64 bits" in message


def test_a_shape_or_a_sum_beyond_64_bits_is_refused() -> None:
    """Each budget may fit where the totals that are stored do not."""
    wide = {"layers": 1, "width": 10**12, "heads": 1, "ffn_width": 8}
    ((place, message),) = refused(scales={"wide": wide})
    assert place == "/scales/wide"
    assert "parameters, which do not fit in 64 bits" in message
    ((place, message),) = refused(short_tokens=[2**62], product_scales=["a"])
    assert place == ""
    assert "sum does not fit in 64 bits" in message
    asked_cells(parse_grid(small_document(short_tokens=[2**61], product_scales=["a"])))


def test_budgets_that_collapse_onto_the_same_steps_name_the_cells() -> None:
    found = refused(short_tokens=[720, 721], long_tokens=[160, 161], product_scales=["a"])
    assert sorted(found) == [
        ("/long_tokens/1", "scale a, D_s = 720, D_l = 161 and 160 (/long_tokens/0) both become 10 steps; keep one"),
        ("/short_tokens/1", "scale a, D_s = 721 and 720 (/short_tokens/0) both become 90 steps; keep one"),
    ]


def test_an_explicit_cell_may_not_collapse_onto_the_product_either() -> None:
    ((pointer, message),) = refused(cells=[{"scale": "a", "short_tokens": 720, "long_tokens": 161}])
    assert pointer == "/cells/0/long_tokens"
    assert "D_l = 161 and 160" in message
    elsewhere = [{"scale": "a", "short_tokens": 640, "long_tokens": 161}]
    assert len(places(cells=elsewhere)) == 9  # another D_s: another cell


def test_the_same_budget_written_twice_counts_once_with_a_warning() -> None:
    """B87, B106: every spelling of a million is one D_s."""
    millions = ["1e6", 1_000_000, "1.0e+6", "1_000_000", 1e6]
    assert len(places(short_tokens=millions, product_scales=["a"])) == 2
    found = warned(short_tokens=millions, product_scales=["a", "b"])
    assert set(found) == {f"/short_tokens/{index}" for index in range(1, 5)}
    assert "the same budget as /short_tokens/0" in found["/short_tokens/1"]


def test_sixteen_powers_of_ten_are_sixteen_budgets() -> None:
    """B87: 4 values x 16 values, one per power of ten up to 10^15, as floats and as integers: 64 runs, each once."""
    recipe = small_document()["recipe"]
    recipe["long"] |= {"seq_len": 2}
    found = [
        places(
            short_tokens=[720, 800, 880, 960],
            long_tokens=[f"{2 * 10**power:.1e}" if as_float else 2 * 10**power for power in range(16)],
            recipe=recipe,
            product_scales=["a"],
        )
        for as_float in (True, False)
    ]
    assert len(set(found[0])) == 64
    assert found[0] == found[1]
    assert {long_steps for _, _, long_steps, _, _ in found[0]} == {10**power for power in range(16)}


def test_warm_up_must_fit_before_the_decay_of_the_smallest_budget() -> None:
    recipe = small_document()["recipe"]
    recipe["short"] |= {"warmup_steps": 81}
    ((pointer, message),) = refused(recipe=recipe, product_scales=["a"])
    assert pointer == "/short_tokens/0"
    assert message.startswith("scale a, D_s = 720: the warm-up of 81 steps does not fit before the decay, in 80 steps")
    recipe["short"] |= {"warmup_steps": 80}
    assert len(places(recipe=recipe)) == 8


def test_the_long_warm_up_must_fit_in_the_smallest_budget() -> None:
    recipe = small_document()["recipe"]
    recipe["long"] |= {"warmup_steps": 11}
    ((pointer, message),) = refused(recipe=recipe, product_scales=["b"])
    assert pointer == "/long_tokens/0"
    assert message.startswith("scale b, D_l = 160: 10 steps are fewer than the warm-up, 11")


def test_a_short_budget_needs_steps_for_its_decay() -> None:
    recipe = small_document()["recipe"]
    recipe["short"] |= {"warmup_steps": 0}
    ((_, message),) = refused(recipe=recipe, short_tokens=[4 * SHORT_STEP], product_scales=["a"])
    assert "4 steps leave none for the decay" in message
    assert len(places(recipe=recipe, short_tokens=[5 * SHORT_STEP], product_scales=["a"])) == 2


def test_a_rule_must_find_its_oldest_checkpoint_in_the_long_stage() -> None:
    """D_l - (M - 1) x spacing must be above zero: the short-stage checkpoint is never merged."""
    rules = [{"name": "last_m", "m": 3, "spacing": 5 * LONG_STEP}]
    ((pointer, message),) = refused(rules=rules, product_scales=["a"])
    assert pointer == "/long_tokens/0"
    assert "last_m(m=3, spacing=80) reads 3 checkpoints 5 steps apart up to step 10" in message
    assert "the oldest would lie at step 0" in message
    assert len(places(rules=[{"name": "last_m", "m": 3, "spacing": 4 * LONG_STEP}])) == 8


def test_a_spacing_is_rounded_like_a_budget() -> None:
    ((pointer, message),) = refused(rules=[{"name": "last_m", "m": 2, "spacing": 17}], product_scales=["a"])
    assert pointer == "/rules/0/spacing"
    assert "17 tokens become 16" in message


def test_rules_are_named_as_written_and_counted_in_steps() -> None:
    rules = [{"name": "raw"}, {"name": "last_m", "m": 2, "spacing": "0.5N"}]  # N of a: 172
    asked = asked_cells(parse_grid(small_document(rules=rules, product_scales=["a"], rounding_tolerance=0.1)))
    assert asked.cells[0].rules == {
        "raw": ObservationRule(name="raw"),
        "last_m(m=2, spacing=0.5N)": ObservationRule(name="last_m", m=2, spacing_steps=5),
    }


def test_two_rules_that_read_the_same_checkpoints_are_refused() -> None:
    rules = [{"name": "last_m", "m": 2, "spacing": 16}, {"name": "last_m", "m": 2, "spacing": 17}]
    ((pointer, message),) = refused(rules=rules, product_scales=["a"], rounding_tolerance=0.1)
    assert pointer == "/rules"
    assert "last_m(m=2, spacing=17) reads the same checkpoints as last_m(m=2, spacing=16)" in message


def test_explicit_cells_override_seeds_rules_and_every() -> None:
    document = small_document(
        product_scales=["a"],
        seeds={"short": [0], "long": [0, 1]},
        cells=[
            {"scale": "b", "short_tokens": 720, "long_tokens": [160, 320], "seeds": {"long": [5]}},
            {
                "scale": "b",
                "short_tokens": 1440,
                "long_tokens": 160,
                "rules": [{"name": "last_m", "m": 2, "spacing": 16}],
                "evaluate_every": None,
            },
        ],
    )
    document["evaluation"]["every"] = 32
    cells = asked_cells(parse_grid(document)).cells
    in_b = [cell for cell in cells if cell.scale.name == "b"]
    assert [(c.place.short_steps, c.place.long_steps, c.place.long_seed) for c in in_b] == [
        (90, 10, 5),
        (90, 20, 5),
        (180, 10, 0),
        (180, 10, 1),
    ]
    assert [list(cell.rules) for cell in in_b] == [["raw"], ["raw"], *[["last_m(m=2, spacing=16)"]] * 2]
    assert [cell.every for cell in in_b] == [{32}, {32}, set(), set()]


def test_a_cell_asked_for_twice_counts_once_and_has_the_rules_of_both() -> None:
    again = {"scale": "a", "short_tokens": 720, "long_tokens": [160, 320]}
    other_rule = again | {"rules": [{"name": "last_m", "m": 2, "spacing": 16}]}
    asked = asked_cells(parse_grid(small_document(cells=[again, other_rule])))
    assert len(asked.cells) == 8
    assert list(asked.cells[0].rules) == ["raw", "last_m(m=2, spacing=16)"]
    assert [(warning.pointer, warning.message) for warning in asked.warnings] == [
        ("/cells/0", "2 of these cells are asked for already; each counts once")
    ]


def test_seeds_and_rules_listed_twice_count_once() -> None:
    found = warned(seeds={"short": [0, 0], "long": [1]}, rules=[{"name": "raw"}, {"name": "raw"}])
    assert set(found) == {"/seeds/short", "/rules/1"}


def test_two_scales_that_are_the_same_are_refused() -> None:
    scale = small_document()["scales"]["a"]
    ((pointer, message),) = refused(scales={"a": scale, "twin": scale})
    assert (pointer, message) == ("/scales/twin", "is the same model and recipe as 'a'; keep one")


def test_a_scale_without_cells_is_worth_a_warning() -> None:
    assert warned(product_scales=["a"]) == {"/scales/b": "no cell uses this scale"}


def test_too_many_cells_are_refused_before_anything_is_planned() -> None:
    seeds = {"short": list(range(1000)), "long": list(range(1000))}
    ((_, message), _) = refused(seeds=seeds)
    assert message == f"asks for 8,000,000 cells; a grid may hold {MAX_CELLS:,} at most"


def test_too_many_evaluations_are_refused_too() -> None:
    document = small_document(long_tokens=[160, 16 * 10**7])
    document["evaluation"]["every"] = 16
    ((_, message),) = refused(**document)
    assert message == "asks for about 40,000,008 evaluations; a grid may hold 1,000,000 at most"


def test_a_rule_without_m_reads_a_thousand_checkpoints_at_most() -> None:
    """Counted before any list of them is made: this D_l has 10^15 of them."""
    rules = [{"name": "ema", "decay": 0.5, "spacing": LONG_STEP}]
    ((pointer, message),) = refused(rules=rules, product_scales=["a"], long_tokens=[LONG_STEP * 10**15])
    assert pointer == "/long_tokens/0"
    assert "reads 1,000,000,000,000,000 checkpoints" in message
    assert "raise spacing or give m" in message
    assert len(places(rules=rules, product_scales=["a"], long_tokens=[LONG_STEP * 1_000])) == 2


def test_rules_that_read_too_many_checkpoints_together_are_refused() -> None:
    rules = [{"name": "ema", "decay": 0.5, "spacing": LONG_STEP}]
    seeds = {"short": list(range(2_001))}
    ((pointer, message),) = refused(
        rules=rules, seeds=seeds, product_scales=["a"], short_tokens=[720], long_tokens=[16_000, 15_984]
    )
    assert pointer == "/rules"
    assert "about 4,002,000 checkpoints" in message


def test_one_pool_with_two_rules_at_one_cell_is_refused() -> None:
    rules = [{"name": "last_m", "m": 2, "spacing": 16, "pool": "p"}]
    other = [{"name": "last_m", "m": 3, "spacing": 16, "pool": "p"}]
    cell = {"scale": "a", "short_tokens": 720, "long_tokens": [160, 480], "rules": other}
    ((pointer, message),) = refused(rules=rules, cells=[cell])
    assert pointer == "/cells/0/rules"
    assert "pool 'p' has another rule for some of these cells" in message
    assert len(places(rules=rules, cells=[cell | {"long_tokens": 480}])) == 9


def test_a_product_of_no_scales_needs_cells() -> None:
    assert refused(product_scales=[])[0][0] == "/product_scales"
    cells = [{"scale": "a", "short_tokens": 720, "long_tokens": 160}]
    assert len(places(product_scales=[], cells=cells)) == 1
