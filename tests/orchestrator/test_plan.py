import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cells import decay_steps_for
from orchestrator.costs import checkpoint_bytes, evaluation_flops, gpu_hours
from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Known, KnownSegment, Plan, PlannedSegment
from tests.orchestrator.small_grid import LONG_STEP, SHORT_STEP, known_after, small_document, small_plan
from workers.spec import (
    AdamW,
    CheckpointRef,
    Chunking,
    EvaluationDocuments,
    Evaluator,
    ModelShape,
    Muon,
    ObservationRule,
    Reference,
)

LAST_3 = {"name": "last_m", "m": 3, "spacing": 2 * LONG_STEP}


def of_kind(planned: Plan, kind: str, scale: str = "a") -> list[PlannedSegment]:
    return [segment for segment in planned.segments if segment.segment.kind == kind and segment.scale == scale]


def test_one_trunk_serves_every_short_budget_and_each_has_its_own_decay() -> None:
    planned = small_plan()
    (trunk,) = of_kind(planned, "short_trunk")
    assert trunk.segment.parent is None
    assert trunk.segment.horizon_steps is None
    assert trunk.save_steps == trunk.missing_steps == (80, 160)
    assert trunk.tokens_train == 160 * SHORT_STEP
    first, second = of_kind(planned, "short_decay")
    assert first.segment.parent == CheckpointRef(segment=trunk.id, step=80)
    assert second.segment.parent == CheckpointRef(segment=trunk.id, step=160)
    assert [segment.save_steps for segment in (first, second)] == [(10,), (20,)]
    assert [segment.segment.horizon_steps for segment in (first, second)] == [10, 20]
    assert [segment.segment.stage_tokens(segment.save_steps[-1]) for segment in (first, second)] == [720, 1440]


def test_under_constant_one_long_segment_passes_through_every_budget() -> None:
    planned = small_plan(rules=[LAST_3], seeds={"short": [0], "long": [0, 1]})
    longs = of_kind(planned, "long_constant")
    assert len(longs) == 4  # two short checkpoints x two seeds
    assert {segment.save_steps for segment in longs} == {(6, 8, 10, 16, 18, 20)}
    assert {segment.tokens_train for segment in longs} == {20 * LONG_STEP}
    assert all(segment.segment.horizon_steps is None for segment in longs)
    assert {segment.segment.seed for segment in longs} == {0, 1}
    # Per scale: trunk 160, decays 10 + 20, four long segments of 20 steps.
    assert planned.tokens_train == 2 * (190 * SHORT_STEP + 80 * LONG_STEP)
    assert planned.tokens_independent == 2 * 2 * (2 * 270 * SHORT_STEP + 2 * 30 * LONG_STEP)


def test_under_linear_decay_each_long_budget_is_a_segment_of_its_own() -> None:
    planned = small_plan(protocol="linear_decay")
    longs = of_kind(planned, "long_linear_decay")
    assert [(segment.segment.horizon_steps, segment.save_steps) for segment in longs] == [(10, (10,)), (20, (20,))] * 2
    assert planned.tokens_train == 2 * (190 * SHORT_STEP + 60 * LONG_STEP)


def test_parents_stand_before_their_children_and_save_where_they_branch() -> None:
    planned = small_plan(rules=[LAST_3], seeds={"short": [0, 1], "long": [0, 1]})
    seen: dict[str, PlannedSegment] = {}
    for segment in planned.segments:
        parent = segment.segment.parent
        assert parent is None or parent.step in seen[parent.segment].save_steps
        assert segment.id == segment.segment.id
        seen[segment.id] = segment


def test_a_cell_is_measured_once_by_each_rule() -> None:
    planned = small_plan(rules=[{"name": "raw"}, LAST_3], product_scales=["a"])
    assert [series.rule for series in planned.series] == ["raw", "last_m(m=3, spacing=32)"]
    evaluations = {evaluation.key: evaluation for evaluation in planned.evaluations}
    assert len(evaluations) == 8
    for cell in planned.cells:
        assert list(cell.series) == [series.id for series in planned.series]
        raw, merged = (evaluations[key] for key in cell.evaluations)
        assert raw.snapshot.rule == ObservationRule(name="raw")
        assert merged.snapshot.rule == ObservationRule(name="last_m", m=3, spacing_steps=2)
        for evaluation in (raw, merged):
            assert evaluation.asked
            assert evaluation.state == "new"
            assert (evaluation.short_tokens, evaluation.long_tokens) == (cell.short_tokens, cell.long_tokens)
            assert evaluation.sources == evaluation.snapshot.sources
            assert evaluation.rope_base == 100_000.0
    first = evaluations[planned.cells[0].evaluations[1]]
    decay = of_kind(planned, "short_decay")[0]
    assert [source.step for source in first.sources] == [6, 8, 10]
    assert first.cluster == f"{decay.id}:10"


def test_cells_and_clusters_are_distinct() -> None:
    planned = small_plan(seeds={"short": [0, 1], "long": [0, 1, 2]})
    assert len({cell.key for cell in planned.cells}) == len(planned.cells) == 2 * 2 * 2 * 2 * 3
    assert len({evaluation.key for evaluation in planned.evaluations}) == len(planned.evaluations)
    clusters = {evaluation.cluster for evaluation in planned.evaluations}
    assert len(clusters) == 2 * 2 * 2  # scale x D_s x short seed; the long seeds share their checkpoint


def test_every_measures_between_the_cells_without_asking_for_more_training() -> None:
    document = small_document(rules=[{"name": "raw"}, LAST_3], product_scales=["a"])
    document["evaluation"]["every"] = 4 * LONG_STEP
    planned = plan(parse_grid(document))
    between = [evaluation for evaluation in planned.evaluations if not evaluation.asked]
    per_trajectory = [(e.snapshot.rule.name, e.long_tokens // LONG_STEP) for e in between[: len(between) // 2]]
    # Multiples of 4 up to 20, but 20 itself is a cell's; last_m with three sources 2 apart needs 5 steps at least.
    assert per_trajectory == [("raw", 4), ("raw", 8), ("raw", 12), ("raw", 16), *[("last_m", n) for n in (8, 12, 16)]]
    assert planned.tokens_train == small_plan(rules=[LAST_3], product_scales=["a"]).tokens_train
    assert len(planned.cells) == 4


def test_zero_can_be_diagnosed_with_and_without_the_new_rope_base() -> None:
    document = small_document(product_scales=["a"], seeds={"long": [0, 1]})
    document["evaluation"]["diagnose_zero"] = True
    planned = plan(parse_grid(document))
    zeros = [evaluation for evaluation in planned.evaluations if evaluation.long_tokens == 0]
    assert [evaluation.rope_base for evaluation in zeros] == [100_000.0, 10_000.0] * 2
    assert not any(evaluation.asked for evaluation in zeros)
    for changed, plain in (zeros[:2], zeros[2:]):
        assert changed.sources == plain.sources == plain.snapshot.sources
        assert changed.snapshot.step == 0
        assert f"{plain.sources[0].segment}:{plain.sources[0].step}" == changed.cluster == plain.cluster
    assert planned.tokens_train == small_plan(product_scales=["a"], seeds={"long": [0, 1]}).tokens_train


def ids(planned: Plan, kind: str) -> set[str]:
    return {segment.id for segment in planned.segments if segment.segment.kind == kind}


def test_identity_holds_what_changes_the_weights_and_nothing_else() -> None:
    """One 0 -> 20 run and a chain 0 -> 10 -> 20 are one segment; what a later stage does leaves the trunk alone."""
    base = small_plan()
    shorter = small_plan(long_tokens=[160], name="other", rounding_tolerance=0.5)
    assert ids(base, "long_constant") == ids(shorter, "long_constant")
    linear = small_plan(protocol="linear_decay")
    assert ids(linear, "short_decay") == ids(base, "short_decay")
    recipe = small_document()["recipe"]
    recipe["long"] |= {"start_rate": 0.5}
    other_long = small_plan(recipe=recipe)
    assert ids(other_long, "short_decay") == ids(base, "short_decay")
    assert not ids(other_long, "long_constant") & ids(base, "long_constant")
    recipe["short"] |= {"final_rate_ratio": 0.5}
    other_decay = small_plan(recipe=recipe)
    assert not ids(other_decay, "short_decay") & ids(base, "short_decay")


def test_cells_keep_their_keys_across_grids_and_change_them_with_protocol_and_recipe() -> None:
    """A name is a label: renaming a scale renames nothing that is measured."""
    base = {cell.key for cell in small_plan().cells}
    assert {cell.key for cell in small_plan(long_tokens=["160", 480]).cells} & base
    scales = small_document()["scales"]
    renamed = small_plan(scales={"x": scales["a"], "y": scales["b"]})
    assert {cell.key for cell in renamed.cells} == base
    assert not {cell.key for cell in small_plan(protocol="linear_decay").cells} & base
    scales["a"]["short"] = {"peak_rate": 0.5}
    assert {cell.key for cell in small_plan(scales=scales, product_scales=["b"]).cells} < base
    assert not {cell.key for cell in small_plan(scales=scales, product_scales=["a"]).cells} & base


def test_scales_that_differ_in_the_long_stage_alone_share_their_trunk() -> None:
    scale = small_document()["scales"]["a"]
    scales = {"cold": scale, "hot": scale | {"long": {"start_rate": 0.5}}}
    planned = small_plan(scales=scales)
    assert len(of_kind(planned, "short_trunk", "cold")) == 1
    assert of_kind(planned, "short_trunk", "hot") == of_kind(planned, "short_decay", "hot") == []
    assert [totals.tokens_train for totals in planned.per_scale] == [
        190 * SHORT_STEP + 40 * LONG_STEP,
        40 * LONG_STEP,
    ]


# What is known already.


def test_a_finished_grid_costs_nothing_again() -> None:
    """Two grids, one segment: a second run re-uses everything and trains nothing."""
    again = small_plan(known_after(small_plan(rules=[LAST_3])), rules=[LAST_3])
    assert (again.tokens_train, again.flops, again.checkpoint_bytes, again.gpu_hours) == (0, 0, 0, 0.0)
    assert {cell.status for cell in again.cells} == {"reused"}
    assert all(segment.missing_steps == () and segment.save_steps for segment in again.segments)


def test_a_measured_cell_needs_no_checkpoints_any_more() -> None:
    known = known_after(small_plan())
    pruned = Known(evaluated=known.evaluated)
    assert small_plan(pruned).tokens_train == 0


def test_extending_trains_the_missing_tokens_alone() -> None:
    known = known_after(small_plan())
    longer = small_plan(known, long_tokens=[160, 320, 800])
    assert longer.tokens_train == 2 * 2 * 30 * LONG_STEP
    assert [cell.status for cell in longer.cells if cell.long_tokens == 800] == ["extended"] * 4
    assert {cell.reason for cell in longer.cells if cell.long_tokens == 800} == {
        "its long stage goes on from 320 tokens"
    }
    further = small_plan(known, short_tokens=[720, 1440, 2160], product_scales=["a"])
    assert further.tokens_train == (80 + 30) * SHORT_STEP + 20 * LONG_STEP
    assert {cell.reason for cell in further.cells if cell.short_tokens == 2160} == {
        "its short stage goes on from 1,280 tokens"
    }
    scales = small_document()["scales"] | {"c": {"layers": 3, "width": 4, "heads": 1, "ffn_width": 8}}
    wider = small_plan(known, scales=scales)
    assert {cell.status for cell in wider.cells if cell.scale == "c"} == {"new"}
    assert wider.tokens_train == 190 * SHORT_STEP + 40 * LONG_STEP
    seeds = small_plan(known, seeds={"long": [0, 1]}, product_scales=["a"])
    assert seeds.tokens_train == 40 * LONG_STEP
    assert {cell.reason for cell in seeds.cells if cell.long_seed == 1 and cell.short_tokens == 720} == {
        "its long stage starts from the known checkpoint at D_s = 720"
    }


def test_a_step_in_between_is_trained_from_the_nearest_checkpoint_below() -> None:
    known = known_after(small_plan(product_scales=["a"], short_tokens=[720]))
    between = small_plan(known, product_scales=["a"], short_tokens=[720], long_tokens=[16 * 13, 16 * 17, 16 * 25])
    (long,) = of_kind(between, "long_constant")
    assert long.missing_steps == (13, 17, 25)
    assert long.tokens_train == (3 + 4 + 5) * LONG_STEP  # from 10, from 13, from 20
    before = small_plan(known, product_scales=["a"], short_tokens=[720], long_tokens=[16 * 4])
    assert before.tokens_train == 4 * LONG_STEP  # from the short checkpoint, which exists


def test_a_missing_ancestor_is_trained_again_only_for_those_who_start_from_it() -> None:
    """The trunk's checkpoints are gone, the decay's is there: the long stage starts from it."""
    finished = small_plan(product_scales=["a"], short_tokens=[720], long_tokens=[160])
    known = known_after(finished)
    (trunk,), (long,) = of_kind(finished, "short_trunk"), of_kind(finished, "long_constant")
    kept = {key: segment for key, segment in known.segments.items() if key not in (trunk.id, long.id)}
    again = small_plan(Known(segments=kept), product_scales=["a"], short_tokens=[720], long_tokens=[160])
    assert again.tokens_train == 10 * LONG_STEP
    nothing = small_plan(Known(), product_scales=["a"], short_tokens=[720], long_tokens=[160])
    assert nothing.tokens_train == 90 * SHORT_STEP + 10 * LONG_STEP


def test_work_under_way_is_not_planned_twice() -> None:
    first = small_plan()
    under_way = Known(
        segments={
            segment.id: KnownSegment(scheduled_steps=frozenset(segment.save_steps)) for segment in first.segments
        },
        in_flight=frozenset(evaluation.key for evaluation in first.evaluations),
    )
    again = small_plan(under_way)
    assert (again.tokens_train, again.evaluation_flops) == (0, 0)
    assert {cell.status for cell in again.cells} == {"in_flight"}
    merged = small_plan(under_way, rules=[{"name": "last_m", "m": 2, "spacing": 160}], long_tokens=[320])
    assert merged.tokens_train == 0
    assert {(cell.status, cell.reason) for cell in merged.cells} == {
        ("extended", "its checkpoints exist; only the measuring is new")
    }


# Prices.


def test_prices_follow_from_the_shapes() -> None:
    planned = small_plan(product_scales=["a"], short_tokens=[720], long_tokens=[160])
    # N = 4*4*4 attention + 3*4*8 feed-forward + 2*4 norms + 4 = 172; head 32 x 4 = 128.
    per_token = 6 * (172 + 128)
    attention_per_context = 6 * 1 * 4
    short = 90 * SHORT_STEP * (per_token + attention_per_context * 4)
    long = 10 * LONG_STEP * (per_token + attention_per_context * 16)
    assert planned.train_flops == short + long
    assert planned.evaluation_flops == 2 * 16 * (per_token + attention_per_context * 16) // 3
    assert planned.flops == planned.train_flops + planned.evaluation_flops
    assert planned.checkpoint_bytes == 3 * 3 * 4 * (172 + 128)  # trunk, decay, long; weights and two moments
    assert planned.gpu_hours == pytest.approx(planned.flops / 1.6e14 / 3600, rel=1e-12)


def test_the_short_context_gap_is_priced_as_chunks() -> None:
    shape = ModelShape(layers=2, width=32, heads=1, kv_heads=1, ffn_width=96, vocab_size=512)
    plain = Evaluator(
        reference=Reference(kind="copy"),
        documents=EvaluationDocuments(corpus="c", count=3, length=1024),
        chunking=Chunking(length=128, stride=32),
    )
    full = 3 * 1024 * shape.forward_flops_per_token(1024)
    assert evaluation_flops(shape, plain) == full
    chunks = 28 * 160 * shape.forward_flops_per_token(160)  # (1024 - 128) / 32 = 28
    assert evaluation_flops(shape, dataclasses.replace(plain, short_context_gap=True)) == full + 3 * chunks


def test_untied_embeddings_are_stored_twice() -> None:
    shape = ModelShape(layers=1, width=4, heads=2, kv_heads=2, ffn_width=8, vocab_size=32)
    assert checkpoint_bytes(shape, AdamW()) == 12 * (172 + 128)
    assert checkpoint_bytes(dataclasses.replace(shape, tied_embeddings=False), AdamW()) == 12 * (172 + 256)


def test_muon_keeps_one_moment_of_what_is_its() -> None:
    shape = ModelShape(layers=1, width=4, heads=2, kv_heads=2, ffn_width=8, vocab_size=32)
    assert checkpoint_bytes(shape, Muon(rate_ratio=10.0)) == 4 * (2 * 172 + 3 * 128)


def test_large_counts_neither_wrap_nor_round() -> None:
    """B19, B22: 6ND = 8.4e22 is far beyond int64."""
    assert gpu_hours(84 * 10**21, gpu_flops=1e15, gpu_utilisation=0.5) == pytest.approx(84e21 / 5e14 / 3600)
    recipe = small_document()["recipe"]
    recipe["long"] |= {"seq_len": 3}
    count = 9_007_199_254_740_993  # 2^53 + 1, a multiple of 3 (B109)
    planned = small_plan(recipe=recipe, long_tokens=[count], short_tokens=[720], product_scales=["a"])
    assert planned.cells[0].long_tokens == count
    assert planned.tokens_train == count + 720
    assert planned.flops > 2**63
    assert isinstance(planned.flops, int)


# Properties. The oracle counts single steps: two cells share a step if everything before it is the same.

Step = tuple[object, ...]


def single_steps(planned: Plan, protocol: str) -> dict[Step, int]:
    """Tokens by step, for the union of all cells' trajectories."""
    steps: dict[Step, int] = {}
    for cell in planned.cells:
        assert cell.short_tokens is not None
        short, long = cell.short_tokens // SHORT_STEP, cell.long_tokens // LONG_STEP
        branch = short - decay_steps_for(short)
        root = (cell.scale, cell.short_seed)
        steps |= {(*root, i): SHORT_STEP for i in range(branch)}
        steps |= {(*root, short, "decay", i): SHORT_STEP for i in range(short - branch)}
        horizon = long if protocol == "linear_decay" else None
        steps |= {(*root, short, cell.long_seed, horizon, i): LONG_STEP for i in range(long)}
    return steps


grids = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(["constant", "linear_decay"]),
        "short_tokens": st.lists(st.integers(6, 60).map(lambda n: n * SHORT_STEP), min_size=1, max_size=4, unique=True),
        "long_tokens": st.lists(st.integers(3, 40).map(lambda n: n * LONG_STEP), min_size=1, max_size=4, unique=True),
        "seeds": st.fixed_dictionaries(
            {name: st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True) for name in ("short", "long")}
        ),
        "product_scales": st.sampled_from([["a"], ["b"], ["a", "b"]]),
    }
)
rule_lists = st.sampled_from(
    [
        [{"name": "raw"}],
        [{"name": "last_m", "m": 3, "spacing": 16}],
        [{"name": "raw"}, {"name": "last_m", "m": 2, "spacing": 32}],
    ]
)


@settings(max_examples=25, deadline=None)
@given(grids, rule_lists)
def test_training_is_the_union_of_all_trajectories(changes: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    if changes["protocol"] == "constant":
        changes = changes | {"rules": rules}
    planned = small_plan(**changes)
    assert planned.tokens_train == sum(single_steps(planned, changes["protocol"]).values())
    assert planned.tokens_train <= planned.tokens_independent
    assert planned.tokens_train == sum(totals.tokens_train for totals in planned.per_scale)
    assert planned.tokens_independent == sum(totals.tokens_independent for totals in planned.per_scale)
    assert len(planned.cells) == sum(totals.cells for totals in planned.per_scale)


@settings(max_examples=25, deadline=None)
@given(grids, st.randoms(use_true_random=False))
def test_the_order_of_budgets_seeds_and_cells_does_not_matter(changes: dict[str, Any], random: Any) -> None:
    cells = [{"scale": "a", "short_tokens": 100 * SHORT_STEP, "long_tokens": [160, 320]}]
    cells += [{"scale": "b", "short_tokens": [90 * SHORT_STEP, 70 * SHORT_STEP], "long_tokens": 480}]
    shuffled = changes | {
        name: random.sample(changes[name], len(changes[name])) for name in ("short_tokens", "long_tokens")
    }
    shuffled["seeds"] = {name: random.sample(seeds, len(seeds)) for name, seeds in changes["seeds"].items()}
    one = small_plan(cells=cells, **changes)
    other = small_plan(cells=cells[::-1], **shuffled)
    assert dataclasses.replace(one, warnings=()) == dataclasses.replace(other, warnings=())


@settings(max_examples=25, deadline=None)
@given(grids, st.data())
def test_an_extension_trains_exactly_the_difference(changes: dict[str, Any], data: st.DataObject) -> None:
    """More budgets above the old ones, more seeds, another scale: plan(B) - plan(A) = plan(B, known A)."""
    first = small_plan(**changes)
    larger = changes | {"product_scales": ["a", "b"]}
    for name, step in (("short_tokens", SHORT_STEP), ("long_tokens", LONG_STEP)):
        more = data.draw(st.lists(st.integers(1, 30), max_size=2, unique=True), label=name)
        # Far enough above for the trunk of the new one to end above the old ones'.
        larger[name] = [*changes[name], *(max(changes[name]) + (2 + 2 * extra) * step for extra in more)]
    larger["seeds"] = {name: sorted({*seeds, data.draw(st.integers(0, 5))}) for name, seeds in changes["seeds"].items()}
    whole = small_plan(**larger)
    extension = small_plan(known_after(first), **larger)
    assert extension.tokens_train == whole.tokens_train - first.tokens_train
    assert extension.flops == whole.flops - first.flops
    old = {cell.key for cell in first.cells}
    assert {cell.key for cell in extension.cells if cell.status == "reused"} == old


@settings(max_examples=25, deadline=None)
@given(grids, grids)
def test_knowing_more_never_costs_more(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Any second grid pays at most its own price, at least what the union adds, and then everything is there."""
    other = other | {"protocol": one["protocol"]}
    first, alone = small_plan(**one), small_plan(**other)
    second = small_plan(known_after(first), **other)
    union = single_steps(first, one["protocol"]) | single_steps(alone, one["protocol"])
    assert sum(union.values()) - first.tokens_train <= second.tokens_train <= alone.tokens_train
    assert small_plan(known_after(first, second), **other).tokens_train == 0


def test_realised_budgets_are_whole_steps_near_the_asked_ones() -> None:
    planned = small_plan(short_tokens=["90N"], long_tokens=["10.5N"], rounding_tolerance=0.1)
    for cell in planned.cells:
        assert cell.short_tokens is not None
        assert cell.short_tokens % SHORT_STEP == cell.long_tokens % LONG_STEP == 0
        assert abs(cell.short_tokens - 90 * cell.n_params) <= SHORT_STEP / 2
        assert abs(cell.long_tokens - Fraction(21, 2) * cell.n_params) <= LONG_STEP / 2


def test_rules_of_one_pool_are_one_series_whatever_their_spacing() -> None:
    def rule(spacing: int, **pool: str) -> dict[str, Any]:
        return {"name": "last_m", "m": 2, "spacing": spacing * LONG_STEP, **pool}

    def cells(**pool: str) -> list[dict[str, Any]]:
        budgets = {"short_tokens": 90 * SHORT_STEP, "long_tokens": 30 * LONG_STEP}
        return [{"scale": "b", **budgets, "rules": [rule(1, **pool)]}]

    apart = small_plan(rules=[rule(2)], cells=cells())
    assert len(apart.series) == 2
    pooled = small_plan(rules=[rule(2, pool="Last2")], cells=cells(pool="Last2"))
    assert [series.rule for series in pooled.series] == ["Last2"]
    assert {e.key for e in pooled.evaluations} == {e.key for e in apart.evaluations}

    with pytest.raises(GridError, match="two rules for the same cells"):
        small_plan(rules=[rule(1, pool="Last2"), rule(2, pool="Last2")])
