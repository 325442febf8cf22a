import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from orchestrator.errors import GridError, Problem
from orchestrator.grid import Grid, load_grid, parse_grid
from orchestrator.grid_problems import models_within
from orchestrator.plan import plan
from orchestrator.recipe import family_of, resolve_evaluator
from tests.orchestrator.small_grid import small_document
from workers.spec import AdamW, DataMix, LongStage, ModelShape, Reference, ShortStage


def problems(document: object) -> dict[str, str]:
    """Messages by pointer; no pointer has two."""
    with pytest.raises(GridError) as caught:
        parse_grid(document)
    found = caught.value.problems
    assert len({problem.pointer for problem in found}) == len(found)
    return {problem.pointer: problem.message for problem in found}


def changed(path: str, value: object, document: dict[str, Any] | None = None) -> dict[str, Any]:
    """The small document with `value` at a slash-separated path."""
    document = document or small_document()
    *parents, last = path.split("/")
    part: Any = document
    for key in parents:
        part = part[int(key)] if isinstance(part, list) else part.setdefault(key, {})
    part[last] = value
    return document


def test_yaml_and_json_give_the_same_grid() -> None:
    document = small_document()
    grid = parse_grid(document)
    assert load_grid(yaml.safe_dump(document), format="yaml") == grid
    assert load_grid(json.dumps(document), format="json") == grid


def test_a_grid_written_out_reads_back_the_same() -> None:
    document = small_document(
        long_tokens={"default": ["10N", "2.5N"], "b": [160]},
        rules=[{"name": "last_m", "spacing": "2N"}, {"name": "raw"}],
        cells=[{"scale": "a", "short_tokens": "1e3N", "long_tokens": [320], "evaluate_every": "1N"}],
    )
    grid = parse_grid(document)
    assert parse_grid(grid.model_dump(mode="json")) == grid
    assert grid.model_dump(mode="json")["long_tokens"] == {"default": ["10N", "2.5N"], "b": [160]}


def test_every_problem_is_reported_at_its_place() -> None:
    document = small_document(short_tokens=[0, "90N"], long_tokens={"default": ["10N"], "c": [-5]}, seeds={"long": []})
    document["scales"]["a"] = {"layers": 1, "width": 10, "heads": 4, "fnn_width": 8}
    document["scales"]["b"]["kv_heads"] = 3
    document["recipe"]["long"] |= {"start_rate": "inherrit", "optimizer": {"beta3": 0.9}}
    document["evaluation"]["reference"] = {"kind": "copie"}
    document["cells"] = [{"scale": "z", "short_tokens": "1.5e0", "long_tokens": 160}]
    assert problems(document) == {
        "/scales/a/heads": "4 heads do not divide the width 10",
        "/scales/a/ffn_width": "is required",
        "/scales/a/fnn_width": "unknown key; did you mean 'ffn_width'?",
        "/scales/b/kv_heads": "3 kv_heads do not divide the 2 heads",
        "/short_tokens/0": "a budget must be above zero, not 0",
        "/long_tokens/c/0": "a budget must be above zero, not -5",
        "/long_tokens/c": "no scale is named 'c'; the grid defines a, b",
        "/seeds/long": "must not be empty",
        "/recipe/long/start_rate": "must be a number, not 'inherrit'",
        "/recipe/long/optimizer/beta3": "unknown key; did you mean 'beta2'?",
        "/evaluation/reference/kind": "must be 'copy' or 'huggingface', not 'copie'",
        "/cells/0/scale": "no scale is named 'z'; the grid defines a, b",
        "/cells/0/short_tokens": "must be a whole number, not '1.5e0'; write tokens (1e9, 1_000_000) or a multiple of N"
        ' ("90N")',
    }


@pytest.mark.parametrize(
    ("path", "value", "pointer", "message"),
    [
        ("protokol", "constant", "/protokol", "unknown key; did you mean 'protocol'?"),
        ("protocol", "cosine", "/protocol", "must be 'constant' or 'linear_decay', not 'cosine'"),
        ("name", "", "/name", "must not be empty"),
        ("name", None, "/name", "must be text, not None"),
        ("name", "x\ny", "/name", "must not contain control characters"),
        ("name", "\ud800", "/name", "must not contain lone surrogates"),
        ("name", "x" * 201, "/name", "must be at most 200 characters long, not 201"),
        ("short_tokens", "90N", "/short_tokens", "must be a list, not '90N'"),
        ("long_tokens/a", [160], "/long_tokens", "has neither 'b' nor 'default'"),
        ("product_scales", ["a", "x"], "/product_scales/1", "no scale is named 'x'"),
        ("scales/a/width", 2, "/scales/a/heads", "a head of width 2 / 2 = 1 is odd; RoPE needs it even"),
        ("scales/a/layers", "two", "/scales/a/layers", "must be a number, not 'two'"),
        ("scales/default", {}, "/scales/default", "this name is kept"),
        ("scales/a/short", {"peek_rate": 1}, "/scales/a/short/peek_rate", "did you mean 'peak_rate'?"),
        ("recipe/short/peak_rate", None, "/recipe/short/peak_rate", "is required, here or under every scale"),
        ("recipe/short/final_rate_ratio", 0, "/recipe/short/final_rate_ratio", "must be above 0, not 0"),
        ("recipe/short/copied_spans", 1.5, "/recipe/short/copied_spans", "must be at most 1, not 1.5"),
        ("recipe/model/tied_embeddings", "yes", "/recipe/model/tied_embeddings", "must be true or false, not 'yes'"),
        ("recipe/model/attention", {"qk_conv": 3}, "/recipe/model/attention/qk_conv", "did you mean 'qk_conv_kernel'?"),
        ("recipe/long/start_rate", 0, "/recipe/long/start_rate", "must be above zero or inherit, not 0"),
        ("evaluation/reference", {"kind": "huggingface"}, "/evaluation/reference/path", "is required"),
        ("evaluation/reference/path", "x", "/evaluation/reference/path", "the copy reference has no path"),
        ("rules", [{"name": "last_m", "m": 1, "spacing": 16}], "/rules/0/m", "must be at least 2, not 1"),
        ("rules", [{"name": "last_m"}], "/rules/0/spacing", "last_m needs the tokens between its checkpoints"),
        ("rules", [{"name": "raw", "m": 4}], "/rules/0/m", "m belongs to last_m"),
        ("rules", [{"name": "emma"}], "/rules/0/name", "must be 'raw', 'last_m', 'one_sqrt', 'ema', 'dare' or 'ties'"),
        ("rules", [], "/rules", "must not be empty"),
        ("seeds/short", [-1], "/seeds/short/0", "must be at least 0, not -1"),
        ("fit/holdout", "largest", "/fit/holdout", 'must be null, "long_tokens=largest" or "scale=NAME"'),
        ("fit/holdout", "scale=c", "/fit/holdout", "no scale is named 'c'"),
        ("cost/gpu_utilisation", 40, "/cost/gpu_utilisation", "must be at most 1, not 40"),
        ("budget/gpu_hours", 0, "/budget/gpu_hours", "must be above 0, not 0"),
        ("rounding_tolerance", 0, "/rounding_tolerance", "must be above 0, not 0"),
    ],
)
def test_a_wrong_value_is_refused_where_it_stands(path: str, value: object, pointer: str, message: str) -> None:
    document = small_document(long_tokens={}) if path.startswith("long_tokens/") else small_document()
    assert message in problems(changed(path, value, document))[pointer]


def test_a_pointer_escapes_what_names_may_contain() -> None:
    document = small_document()
    document["scales"]["1/2~x"] = {"layers": 0}
    assert "/scales/1~12~0x/layers" in problems(document)


def test_what_is_no_grid_at_all_is_refused() -> None:
    nothing: list[object] = [None, [], "grid", "3"]
    for document in nothing:
        assert problems(document) == {"": "must be a mapping with name, protocol, scales, ..."}
    assert set(problems({})) == {"/name", "/protocol", "/scales", "/recipe", "/evaluation"}
    without = small_document()
    del without["short_tokens"], without["long_tokens"]
    assert problems(without) == {"": "asks for no cells: give short_tokens and long_tokens, or cells"}
    half = small_document()
    del half["long_tokens"]
    assert problems(half) == {"/long_tokens": "is required for the product of budgets"}


@pytest.mark.parametrize(
    "name", ["Größe/实验 №1", "a:b", "x (3, 4)", " trailing. ", "..%2f..%2fetc%2fpasswd", "x" * 200]
)
def test_names_are_kept_as_they_are(name: str) -> None:
    """B90: a name is a label."""
    document = small_document(name=name)
    document["scales"] = {name: document["scales"]["a"]}
    grid = load_grid(json.dumps(document), format="json")
    assert grid.name == name
    assert grid.resolve(name).name == name


def test_under_linear_decay_only_the_end_of_a_run_is_observed() -> None:
    document = small_document(
        protocol="linear_decay",
        rules=[{"name": "raw"}, {"name": "last_m", "spacing": 16}],
        cells=[{"scale": "a", "short_tokens": 720, "long_tokens": 160, "evaluate_every": 16}],
    )
    document["evaluation"]["every"] = 32
    assert set(problems(document)) == {"/rules/1", "/evaluation/every", "/cells/0/evaluate_every"}


def test_a_scale_overrides_the_recipe_field_by_field() -> None:
    document = small_document()
    document["recipe"]["short"]["optimizer"] = {"beta2": 0.98}
    document["scales"]["b"] |= {
        "kv_heads": 1,
        "short": {"peak_rate": 0.004, "optimizer": {"beta1": 0.8}},
        "long": {"warmup_steps": 3, "copied_spans": 0.5},
    }
    resolved = parse_grid(document).resolve("b")
    corpus = "0123456789abcdef0123456789abcdef"
    assert resolved.shape == ModelShape(layers=2, width=8, heads=2, kv_heads=1, ffn_width=16, vocab_size=32)
    assert resolved.short == ShortStage(
        seq_len=4,
        batch_sequences=2,
        rope_base=10_000.0,
        peak_rate=0.004,
        warmup_steps=5,
        final_rate_ratio=0.1,
        data=DataMix(corpus=corpus, split="short"),
        optimizer=AdamW(beta1=0.8, beta2=0.98),
    )
    assert resolved.long == LongStage(
        seq_len=16,
        batch_sequences=1,
        rope_base=100_000.0,
        start_rate=0.004 * 0.1,
        optimizer_state="carry",
        warmup_steps=3,
        final_rate_ratio=1.0,
        data=DataMix(corpus=corpus, split="long", copied_spans=0.5),
    )


def test_the_floor_of_the_long_decay_belongs_to_linear_decay_alone() -> None:
    linear = parse_grid(changed("recipe/long/final_rate_ratio", 0.2, small_document(protocol="linear_decay")))
    constant = parse_grid(changed("recipe/long/final_rate_ratio", 0.2))
    assert linear.resolve("a").long.final_rate_ratio == 0.2
    assert constant.resolve("a").long == parse_grid(small_document()).resolve("a").long


def test_a_setting_may_be_given_by_every_scale_instead_of_the_recipe() -> None:
    document = small_document()
    del document["recipe"]["short"]["peak_rate"]
    document["scales"]["a"]["short"] = {"peak_rate": 0.01}
    assert problems(document) == {"/recipe/short/peak_rate": "is required, here or under every scale (not given for b)"}
    document["scales"]["b"]["short"] = {"peak_rate": 0.02}
    grid = parse_grid(document)
    shorts = [grid.resolve(name).short for name in ("a", "b")]
    assert [short.peak_rate for short in shorts if short is not None] == [0.01, 0.02]


def test_a_copy_reference_counts_the_recipes_corpus() -> None:
    grid = parse_grid(small_document())
    evaluator = resolve_evaluator(grid.evaluation, grid.recipe)
    assert evaluator.reference == Reference(kind="copy", digest="0123456789abcdef0123456789abcdef")
    assert evaluator.documents.corpus == "0123456789abcdef0123456789abcdef"


def family(document: dict[str, Any]) -> str:
    return family_of(parse_grid(document).recipe)


def test_a_recipe_family_leaves_out_scales_seeds_protocol_and_evaluator() -> None:
    same = [
        small_document(name="other", protocol="linear_decay", seeds={"short": [3], "long": [4]}),
        small_document(short_tokens=["90N"], rules=[{"name": "last_m", "spacing": 16}]),
        changed("scales/a/short", {"peak_rate": 0.5}),
        changed("evaluation/gain_threshold", 1.0),
        changed("recipe/short/final_rate_ratio", 0.1),  # the default, written out
        changed("recipe/short/optimizer", {"beta2": 0.95}),
        changed("recipe/short/peak_rate", "1.0e-2"),
        changed("recipe/long/final_rate_ratio", 0.5),  # of the protocol
    ]
    assert {family(document) for document in same} == {family(small_document())}
    other = [
        changed("recipe/short/peak_rate", 0.011),
        changed("recipe/long/start_rate", 0.001),
        changed("recipe/model/vocab_size", 33),
        changed("recipe/corpus", "f" * 32),
        changed("recipe/long/optimizer", {"weight_decay": 0}),
    ]
    assert len({family(document) for document in [small_document(), *other]}) == 1 + len(other)


DOCS = (Path(__file__).parents[2] / "docs" / "grid.md").read_text(encoding="utf-8")


def test_the_example_of_the_reference_page_is_a_grid() -> None:
    example = DOCS.split("```yaml\n")[1].split("```")[0]
    planned = plan(load_grid(example, format="yaml"))
    # small: 2 D_s x 2 D_l x 3 seeds; large: 2 x 1 x 3, and 1 x 2 x 1 explicit ones.
    assert (len(planned.cells), planned.warnings) == (12 + 6 + 2, ())


def test_the_reference_page_names_every_key() -> None:
    def keys(model: type[BaseModel]) -> set[str]:
        inner = [part for field in model.model_fields.values() for part in models_within(field.annotation)]
        names = {field.alias or name for name, field in model.model_fields.items()}
        return names.union(*map(keys, inner))

    assert {key for key in keys(Grid) if not re.search(rf"\b{key}\b", DOCS)} == set()


def test_a_problem_reads_as_place_and_message() -> None:
    error = GridError([Problem(pointer="/a", message="is wrong"), Problem(pointer="", message="so is all")])
    assert str(error) == "/a: is wrong\nso is all"


def test_a_grid_never_changes() -> None:
    grid = parse_grid(small_document())
    assert isinstance(grid, Grid)
    with pytest.raises(ValueError, match="frozen"):
        grid.name = "x"  # type: ignore[misc]
