"""The trained model: Hugging Face's `LlamaForCausalLM` built from a shape, or any model in a folder, checked once it
stands.

What a config says proves nothing: rotary bases are read off the frequencies of the built model.

The only piece of our own is `ConvolvedProjection`, which takes the place of `q_proj` and `k_proj` where the shape asks
for it (Primer's multi-DConv-head attention, So et al. 2021, on queries and keys).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workers.errors import ModelMismatchError
from workers.folder_model import counted, load_folder
from workers.rope import inverse_frequencies, yarn_attention_factor
from workers.spec import FolderModel, ModelShape, Yarn

_ROPE_TOLERANCE = 1e-4
_QUERY_TAPS = (1.0,)
_KEY_TAPS = (0.5, 0.5)


class _CausalTaps(torch.autograd.Function):
    """y[t] = sum over j of taps[j] * u[t - j], per channel. Written out because autograd would allocate a zeroed copy
    of the gradient for every shifted slice. With `positions`, a sum ends where its document begins: j <= position."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, taps: Tensor, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(u, taps)
        ctx.positions = positions
        y = u * taps[0]
        for j in range(1, len(taps)):
            y[:, j:].addcmul_(_within_document(u[:, :-j], positions, j), taps[j])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        u, taps = ctx.saved_tensors
        (g,) = gradients
        gradient = g * taps[0]
        product = g * u
        of_taps = [product.sum((0, 1))]
        for j in range(1, len(taps)):
            later = _within_document(g[:, j:], ctx.positions, j)
            gradient[:, :-j].addcmul_(later, taps[j])
            of_taps.append(torch.mul(later, u[:, :-j], out=product[:, j:]).sum((0, 1)))
        return gradient, torch.stack(of_taps), None


def _within_document(shifted: Tensor, positions: Tensor | None, taps_back: int) -> Tensor:
    """Zero where a document began fewer than `taps_back` tokens before."""
    if positions is None:
        return shifted
    return shifted.masked_fill((positions[:, taps_back:] < taps_back)[..., None], 0.0)


class ConvolvedProjection(nn.Linear):
    """A bias-free projection u = W x, followed along the sequence by y[t] = sum over j of kernel[:, 0, j] * u[t - j].

    `kernel` has the layout of a depthwise `Conv1d` weight but for the order of taps: (channels, 1, taps), newest first.
    It sees whole sequences from their first token on; it keeps no past for token-by-token generation. While `positions`
    are set (`workers.attention`), it does not look across the beginning of a document.
    """

    positions: Tensor | None = None

    def __init__(self, projection: nn.Linear, *, kernel: int, taps: tuple[float, ...]) -> None:
        super().__init__(projection.in_features, projection.out_features, bias=False)
        self.weight = projection.weight
        initial = torch.zeros(self.out_features, 1, kernel)
        for j, tap in enumerate(taps[:kernel]):
            initial[:, 0, j] = tap
        self.kernel = nn.Parameter(initial)

    def forward(self, input: Tensor) -> Tensor:
        taps = self.kernel.squeeze(1).t().contiguous()
        convolved: Tensor = _CausalTaps.apply(F.linear(input, self.weight), taps, self.positions)  # type: ignore[no-untyped-call]
        return convolved


def open_model(
    shape: ModelShape | FolderModel,
    *,
    rope_base: float,
    max_positions: int,
    store: Path,
    seed: int,
    yarn: Yarn | None = None,
) -> PreTrainedModel:
    """The model that a segment starts from: random weights of a shape, or those of a folder in the store.

    In float32 on the CPU, with this RoPE; `seed` does not matter to a folder's weights.

    Raises:
        ModelMissingError, ModelMismatchError: if the folder is not there or not what its digest says, or if the model
            has another N or rotates otherwise than asked for.
    """
    if isinstance(shape, ModelShape):
        return build_model(shape, rope_base=rope_base, max_positions=max_positions, seed=seed, yarn=yarn)
    rope, positions = _rope(rope_base, yarn, max_positions)
    model = load_folder(store, shape, rope_parameters=rope, max_positions=positions)
    check_model(model, shape, rope_base=rope_base, yarn=yarn)
    return model


def build_model(
    shape: ModelShape, *, rope_base: float, max_positions: int, seed: int, yarn: Yarn | None = None
) -> LlamaForCausalLM:
    """A float32 model on the CPU whose weights are a function of `shape` and `seed` alone.

    Matrices and embeddings are drawn from normal(0, init_std), norms are 1, convolutions pass queries unchanged and
    average each key with the one before it. The process's random state is left as it was.

    Raises:
        ModelMismatchError: if the built model has another N than the shape, or rotates otherwise than asked for.
    """
    if shape.head_dim * shape.heads != shape.width or shape.head_dim < 4 or shape.head_dim % 2:
        raise ModelMismatchError(
            f"width {shape.width} with {shape.heads} heads: the width must be a multiple of the heads, and each head"
            " an even number of channels, at least 4"
        )
    if shape.heads % shape.kv_heads:
        raise ModelMismatchError(f"{shape.heads} heads cannot share {shape.kv_heads} kv_heads evenly")
    rope, positions = _rope(rope_base, yarn, max_positions)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        initializer_range=shape.init_std,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied_embeddings,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
        attn_implementation="sdpa",
        qk_conv_kernel=shape.qk_conv_kernel,
    )
    with torch.random.fork_rng(devices=()):
        model = LlamaForCausalLM(config)
        if shape.qk_conv_kernel:
            for layer in model.model.layers:
                attention = layer.self_attn
                for name, taps in (("q_proj", _QUERY_TAPS), ("k_proj", _KEY_TAPS)):
                    projection = getattr(attention, name)
                    wrapped = ConvolvedProjection(projection, kernel=shape.qk_conv_kernel, taps=taps)
                    setattr(attention, name, wrapped)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, shape.init_std, generator=generator)
    check_model(model, shape, rope_base=rope_base, yarn=yarn)
    return model


def load_weights(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies `tensors` into the parameters of the same names, one at a time; a tied head follows its embedding.

    Raises:
        ModelMismatchError: if a parameter gets no tensor or two, a tensor has no parameter, or a shape differs.
    """
    missing = dict(model.named_parameters())  # a tied head is not listed: it is the embedding
    with torch.no_grad():
        for name, tensor in tensors:
            parameter = missing.pop(name, None)
            if parameter is None:
                raise ModelMismatchError(f"the weights hold {name}, which the model has not (or has had already)")
            if parameter.shape != tensor.shape:
                raise ModelMismatchError(f"{name} is {tuple(tensor.shape)}, the model wants {tuple(parameter.shape)}")
            parameter.copy_(tensor)
    if missing:
        raise ModelMismatchError(f"the weights lack {', '.join(sorted(missing))}")
    if model.config.tie_word_embeddings:
        model.tie_weights()


def built_rope_base(model: PreTrainedModel) -> float:
    """The RoPE base that a model without interpolation rotates with, from its frequencies and not from its config.

    With d the width of a head, inv_freq[i] = base^(-2i/d) for i < d/2, so base = inv_freq[-1]^(-d/(d-2)).
    """
    inv_freq = _rotary(model).inv_freq.tolist()
    d = 2 * len(inv_freq)
    return math.pow(inv_freq[-1], -d / (d - 2))


def check_model(
    model: PreTrainedModel, shape: ModelShape | FolderModel, *, rope_base: float, yarn: Yarn | None = None
) -> None:
    """Compares what was built, not what was configured, with what was asked for.

    Raises:
        ModelMismatchError: if N differs, or any rotary frequency, or what YaRN multiplies them with.
    """
    n_params, _ = counted(model)
    if n_params != shape.n_params:
        raise ModelMismatchError(f"the built model has N = {n_params}, its shape says {shape.n_params}")
    rotary = _rotary(model)
    built = rotary.inv_freq.tolist()
    asked = inverse_frequencies(2 * len(built), rope_base, yarn)
    if yarn is None and not math.isclose(built_rope_base(model), rope_base, rel_tol=_ROPE_TOLERANCE):
        raise ModelMismatchError(
            f"the built model rotates with base {built_rope_base(model):g}, {rope_base:g} was asked for"
        )
    for pair, (frequency, wanted) in enumerate(zip(built, asked, strict=True)):
        if not math.isclose(frequency, wanted, rel_tol=_ROPE_TOLERANCE):
            raise ModelMismatchError(
                f"pair {pair} of the built model turns by {frequency:g} per position; base {rope_base:g} with"
                f" {yarn or 'no interpolation'} makes it {wanted:g}"
            )
    if not math.isclose(rotary.attention_scaling, yarn_attention_factor(yarn), rel_tol=_ROPE_TOLERANCE):
        raise ModelMismatchError(
            f"the built model scales its rotation by {rotary.attention_scaling:g}, not by"
            f" {yarn_attention_factor(yarn):g}"
        )


def _rope(rope_base: float, yarn: Yarn | None, max_positions: int) -> tuple[dict[str, Any], int]:
    """Hugging Face's `rope_parameters`, whole as they must be, and the positions to announce."""
    if yarn is None:
        return {"rope_type": "default", "rope_theta": float(rope_base)}, max_positions
    parameters = {
        "rope_type": "yarn",
        "rope_theta": float(rope_base),
        "factor": float(yarn.factor),
        "original_max_position_embeddings": yarn.original_positions,
    }
    return parameters, max(max_positions, round(yarn.factor * yarn.original_positions))


def _rotary(model: PreTrainedModel) -> Any:
    """The one module that holds the model's frequencies; one per kind of layer is more than one base can set."""
    found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len(found) != 1:
        raise ModelMismatchError(f"the model has {len(found)} sets of rotary frequencies; one RoPE base needs one")
    return found[0]
