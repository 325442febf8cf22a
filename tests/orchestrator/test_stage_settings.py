"""What the settings of a stage resolve to, and that what came later renames nothing that was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import GridError
from orchestrator.grid import load_grid, parse_grid
from orchestrator.plan import plan
from orchestrator.recipe import family_of
from tests.orchestrator.small_grid import small_document, small_plan
from workers.rope import ntk_base
from workers.spec import AdamW, BlendedSource, DataMix, Execution, Muon, Yarn, content_hash

GRIDS = Path(__file__).parents[2] / "grids"
CORPUS = "0123456789abcdef0123456789abcdef"


def with_long(**settings: Any) -> dict[str, Any]:
    """The small document (long: 16 tokens x 1, heads 2 and 4 wide) with changes to its long stage."""
    document = small_document()
    document["recipe"]["long"] |= settings
    return document


def with_rope(**rope: Any) -> dict[str, Any]:
    document = with_long(rope=rope)
    document["scales"]["a"] |= {"width": 16}
    del document["recipe"]["long"]["rope_base"]
    return document


def messages(document: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(GridError) as caught:
        plan(parse_grid(document))
    return {problem.pointer: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("paper-constant", "187906f1b33b0a5088ed62423c4e8b46"),
        ("paper-linear-decay", "5190e1885e89e81de25df0238a5d468d"),
        ("tiny", "ac09f9c467610609b2d2ff22f0e002c4"),
    ],
)
def test_identities_of_known_grids_stay_what_they_were(name: str, identity: str) -> None:
    """Whoever has trained one of these keeps what is trained: segments, evaluations, cells and series.

    Only a new NUMERICS_VERSION may rename them, and does: these names are of version 2.
    """
    planned = plan(load_grid((GRIDS / f"{name}.yaml").read_text(encoding="utf-8"), format="yaml"))
    ids = [[part.id for part in planned.segments], [part.key for part in planned.evaluations]]
    assert content_hash([*ids, [cell.key for cell in planned.cells], [s.id for s in planned.series]]) == identity


def test_settings_written_out_at_their_defaults_are_the_same_recipe() -> None:
    plain = parse_grid(small_document())
    written = with_long(packing="stream", min_document_tokens=0, blended=[], z_loss=0, precision="fp32")
    written["recipe"]["long"] |= {"decay_shape": "linear", "optimizer": {"name": "adamw"}}
    assert parse_grid(written).resolve("a") == plain.resolve("a")
    assert family_of(parse_grid(written).recipe) == family_of(plain.recipe)


def test_muon_has_one_weight_decay_and_adamw_beside_it() -> None:
    optimizer = {"name": "muon", "rate_ratio": 20, "momentum": 0.9, "weight_decay": 0.2, "beta2": 0.98}
    grid = parse_grid(with_long(optimizer=optimizer, optimizer_state="fresh"))
    expected = Muon(rate_ratio=20.0, momentum=0.9, weight_decay=0.2, adamw=AdamW(beta2=0.98, weight_decay=0.2))
    assert grid.resolve("a").long.optimizer == expected
    short = grid.resolve("a").short
    assert short is not None
    assert short.optimizer == AdamW()
    assert family_of(grid.recipe) != family_of(parse_grid(small_document()).recipe)


def test_settings_of_muon_without_muon_and_muon_without_its_rate_are_refused() -> None:
    assert "give name: muon" in messages(with_long(optimizer={"momentum": 0.9}))["/recipe/long/optimizer"]
    assert "needs rate_ratio" in messages(with_long(optimizer={"name": "muon"}))["/recipe/long/optimizer"]


def test_state_of_another_optimizer_is_not_carried() -> None:
    muon = {"name": "muon", "rate_ratio": 20}
    assert "must be fresh" in messages(with_long(optimizer=muon))["/recipe/long/optimizer_state"]
    both = with_long(optimizer=muon)
    both["recipe"]["short"]["optimizer"] = muon
    assert parse_grid(both).resolve("a").long.optimizer_state == "carry"


def test_abf_is_the_base_itself() -> None:
    plain, abf = parse_grid(small_document()), parse_grid(with_rope(method="abf", base=100_000))
    assert abf.resolve("b") == plain.resolve("b")
    assert family_of(abf.recipe) == family_of(plain.recipe)


def test_ntk_derives_the_base_from_the_short_stages_and_the_lengths() -> None:
    """From 4 to 16 tokens: a factor of 4 on the base 10,000, with heads 4 wide."""
    long = parse_grid(with_rope(method="ntk")).resolve("b").long
    assert long.rope_base == ntk_base(10_000, 4, 4) == pytest.approx(160_000)
    assert long.yarn is None
    given = parse_grid(with_rope(method="ntk", base=500, factor=3)).resolve("b").long
    assert given.rope_base == ntk_base(500, 3, 4)


def test_yarn_keeps_the_base_and_interpolates() -> None:
    long = parse_grid(with_rope(method="yarn")).resolve("b").long
    assert (long.rope_base, long.yarn) == (10_000, Yarn(factor=4.0, original_positions=4))
    given = parse_grid(with_rope(method="yarn", factor=2, original_length=8, base=5e5)).resolve("b").long
    assert (given.rope_base, given.yarn) == (500_000, Yarn(factor=2.0, original_positions=8))


def test_impossible_rope_is_refused() -> None:
    assert "abf needs base" in messages(with_rope(method="abf"))["/recipe/long/rope"]
    assert "abf has a base alone" in messages(with_rope(method="abf", base=1e5, factor=2))["/recipe/long/rope"]
    assert "give one of them" in messages(with_long(rope={"method": "ntk"}))["/recipe/long"]


def test_a_scale_may_replace_the_recipes_rope_by_a_base() -> None:
    document = with_rope(method="yarn")
    document["scales"]["a"]["long"] = {"rope_base": 7_000}
    grid = parse_grid(document)
    assert (grid.resolve("a").long.rope_base, grid.resolve("a").long.yarn) == (7_000, None)
    assert grid.resolve("b").long.yarn is not None


def test_mixtures_resolve_to_shares_of_the_tokens() -> None:
    data = {
        "packing": "documents",
        "min_document_tokens": 8,
        "full_length_share": 0.75,
        "blended": [{"corpus": "f" * 32, "share": 0.25}, {"corpus": CORPUS, "split": "short", "share": 0.1}],
    }
    assert parse_grid(with_long(**data)).resolve("a").long.data == DataMix(
        corpus=CORPUS,
        split="long",
        packing="documents",
        min_document_tokens=8,
        full_length_share=0.75,
        blended=(
            BlendedSource(corpus="f" * 32, split="long", share=0.25),
            BlendedSource(corpus=CORPUS, split="short", share=0.1),
        ),
    )


def test_impossible_mixtures_are_refused() -> None:
    whole = [{"corpus": "f" * 32, "share": 0.5}, {"corpus": "e" * 32, "share": 0.5}]
    assert "leave nothing" in messages(with_long(blended=whole))["/recipe/long/blended"]
    tenths = [{"corpus": f"{number:032x}", "share": 0.1} for number in range(10)]  # as floats they sum to less than 1
    assert "leave nothing" in messages(with_long(blended=tenths))["/recipe/long/blended"]
    third = [{"corpus": "f" * 32, "share": 0.33333}]
    assert "more decimals" in messages(with_long(blended=third))["/recipe/long/blended"]
    uneven = with_long(packing="documents", full_length_share=0.12345)
    assert "more decimals" in messages(uneven)["/recipe/long/full_length_share"]
    assert "needs packing: documents" in messages(with_long(full_length_share=0.5))["/recipe/long/full_length_share"]


def test_the_shape_of_a_decay_belongs_to_linear_decay_alone() -> None:
    document = with_long(decay_shape="cosine")
    assert parse_grid(document).resolve("a") == parse_grid(small_document()).resolve("a")
    decaying = parse_grid(document | {"protocol": "linear_decay"})
    assert decaying.resolve("a").long.decay_shape == "cosine"
    assert family_of(decaying.recipe) == family_of(parse_grid(small_document()).recipe)
    assert plan(decaying).series[0].id != small_plan(protocol="linear_decay").series[0].id


def test_execution_is_provenance_and_no_identity() -> None:
    document = small_document(execution={"sharding": "shard"})
    document["scales"]["b"]["execution"] = {"micro_batch_tokens": 16, "recompute_activations": True}
    planned = plan(parse_grid(document))
    assert [s.id for s in planned.segments] == [s.id for s in small_plan().segments]
    assert {s.execution for s in planned.segments if s.scale == "a"} == {Execution(sharding="shard")}
    assert {s.execution for s in planned.segments if s.scale == "b"} == {
        Execution(sharding="shard", micro_batch_tokens=16, recompute_activations=True)
    }
    assert {s.execution for s in small_plan().segments} == {Execution()}


def test_processes_and_micro_batches_take_whole_sequences() -> None:
    assert (
        "2 processes do not divide a batch of 1"
        in messages(small_document(execution={"processes": 2}))["/scales/a/execution"]
    )
    found = messages(small_document(execution={"micro_batch_tokens": 15}))
    assert found["/scales/b/execution"] == "micro_batch_tokens 15 do not hold a sequence of 16"
