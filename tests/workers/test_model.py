"""The built model: its N, its RoPE base, its seeded weights, its convolutions, and loading weights into it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.tiny_training import SHAPE
from workers.errors import ModelMismatchError
from workers.model import (
    ConvolvedProjection,
    _CausalTaps,
    build_model,
    built_rope_base,
    check_model,
    load_weights,
)
from workers.spec import ModelShape

PLAIN = dataclasses.replace(SHAPE, qk_conv_kernel=0)


def weights_of(shape: ModelShape = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    model = build_model(shape, rope_base=1e4, max_positions=32, seed=seed)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kernel", [0, 1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_built_model_has_the_n_of_its_shape(layers: int, kernel: int, tied: bool) -> None:
    shape = dataclasses.replace(SHAPE, layers=layers, qk_conv_kernel=kernel, tied_embeddings=tied)
    model = build_model(shape, rope_base=1e4, max_positions=32, seed=0)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total - shape.embedding_params == shape.n_params


def test_known_sizes_of_the_quick_start() -> None:
    sizes = {}
    for width in (32, 64, 96):
        shape = ModelShape(
            layers=2,
            width=width,
            heads=width // 32,
            kv_heads=width // 32,
            ffn_width=3 * width,
            vocab_size=512,
            qk_conv_kernel=3,
        )
        build_model(shape, rope_base=1e4, max_positions=128, seed=0)
        sizes[width] = shape.n_params
    assert sizes == {32: 27_168, 64: 107_584, 96: 241_248}


@pytest.mark.parametrize("base", [1e4, 1e5, 5e5, 5e6, 1.28e8])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_rope_base_is_recovered_from_the_built_frequencies(base: float, heads: int) -> None:
    shape = dataclasses.replace(SHAPE, heads=heads, kv_heads=1)
    model = build_model(shape, rope_base=base, max_positions=32, seed=0)
    assert built_rope_base(model) == pytest.approx(base, rel=1e-5)


def test_config_that_was_changed_after_building_does_not_hide_the_built_base() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    model.config.rope_parameters["rope_theta"] = 5e6
    assert built_rope_base(model) == pytest.approx(1e4, rel=1e-5)
    with pytest.raises(ModelMismatchError, match="base 10000"):
        check_model(model, SHAPE, rope_base=5e6)


def test_another_n_than_the_shape_says_is_refused() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    with pytest.raises(ModelMismatchError, match=f"N = {SHAPE.n_params}"):
        check_model(model, dataclasses.replace(SHAPE, ffn_width=SHAPE.ffn_width + 1), rope_base=1e4)


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads"),
    [(16, 3, 1), (16, 8, 8), (16, 4, 3), (12, 4, 2)],
)
def test_impossible_heads_are_refused(width: int, heads: int, kv_heads: int) -> None:
    shape = dataclasses.replace(SHAPE, width=width, heads=heads, kv_heads=kv_heads)
    with pytest.raises(ModelMismatchError, match="heads"):
        build_model(shape, rope_base=1e4, max_positions=32, seed=0)


def test_weights_are_a_function_of_shape_and_seed_alone() -> None:
    torch.manual_seed(1)
    first = weights_of()
    torch.manual_seed(2)
    torch.rand(5)
    again = weights_of()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], weights_of(seed=1)["model.embed_tokens.weight"])


def test_building_leaves_the_process_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(SHAPE, rope_base=1e4, max_positions=32, seed=7)
    assert torch.equal(before, torch.get_rng_state())


def test_initial_spread_is_init_std() -> None:
    for name, weight in weights_of(dataclasses.replace(SHAPE, width=64, init_std=0.05)).items():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(0.05, rel=0.1), name


def test_convolution_starts_as_identity_on_queries_and_mean_of_two_on_keys() -> None:
    attention = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0).model.layers[0].self_attn
    x = torch.randn(2, 9, SHAPE.width, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attention.q_proj(x), F.linear(x, attention.q_proj.weight))
    u = F.linear(x, attention.k_proj.weight)
    expected = 0.5 * u
    expected[:, 1:] += 0.5 * u[:, :-1]
    torch.testing.assert_close(attention.k_proj(x), expected)


def test_convolution_agrees_with_a_depthwise_conv1d_and_its_gradient_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = taps.flip(0).t().unsqueeze(1)
    expected = F.conv1d(F.pad(u.transpose(1, 2), (2, 0)), weight, groups=3).transpose(1, 2)
    torch.testing.assert_close(_CausalTaps.apply(u, taps, None), expected)  # type: ignore[no-untyped-call]
    assert torch.autograd.gradcheck(lambda *given: _CausalTaps.apply(*given, None), (u, taps))  # type: ignore[no-untyped-call]


def test_convolution_of_packed_documents_is_that_of_each_and_its_gradient_agrees_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 1, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]])
    packed = _CausalTaps.apply(u, taps, positions)  # type: ignore[no-untyped-call]
    for row, begin, end in ((0, 0, 2), (0, 2, 3), (0, 3, 7), (1, 0, 6), (1, 6, 7)):
        alone = _CausalTaps.apply(u[row : row + 1, begin:end], taps, None)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(packed[row, begin:end], alone[0])
    assert torch.autograd.gradcheck(_CausalTaps.apply, (u, taps, positions))


def test_logits_do_not_see_the_future() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    for layer in model.model.layers:
        assert isinstance(layer.self_attn.k_proj, ConvolvedProjection)
    ids = torch.arange(20).unsqueeze(0)
    changed = ids.clone()
    changed[0, 12:] += 100
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert torch.equal(first[:, :12], second[:, :12])
    assert not torch.equal(first[:, 12], second[:, 12])


def test_loaded_weights_bring_the_tied_head_along() -> None:
    """B41: the head is not among the stored tensors and must follow the embedding."""
    source = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=1)
    target = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=2)
    tensors = dict(source.named_parameters())
    assert "lm_head.weight" not in tensors
    load_weights(target, tensors.items())
    assert target.lm_head.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(source(input_ids=ids).logits, target(input_ids=ids).logits)


def test_untied_head_is_a_weight_of_its_own() -> None:
    shape = dataclasses.replace(PLAIN, tied_embeddings=False)
    weights = weights_of(shape, seed=1)
    assert "lm_head.weight" in weights
    model = build_model(shape, rope_base=1e4, max_positions=32, seed=2)
    load_weights(model, weights.items())
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_incomplete_or_foreign_weights_are_refused() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    weights = weights_of()
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ModelMismatchError, match=f"lack {name}"):
        load_weights(model, [(key, tensor) for key, tensor in weights.items() if key != name])
    with pytest.raises(ModelMismatchError, match=r"lm_head\.weight"):
        load_weights(model, [*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"])])
    with pytest.raises(ModelMismatchError, match="already"):
        load_weights(model, [*weights.items(), (name, weights[name])])
    with pytest.raises(ModelMismatchError, match="the model wants"):
        load_weights(model, (weights | {name: weights[name].t()}).items())
    plain = build_model(PLAIN, rope_base=1e4, max_positions=32, seed=0)
    with pytest.raises(ModelMismatchError, match="kernel"):
        load_weights(plain, weights.items())
