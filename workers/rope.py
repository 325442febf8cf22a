"""Rotary frequencies, from their formulas: what a plan resolves to and what a built model is checked against.

With d the width of a head, channel pair i < d/2 turns by base^(-2i/d) per position (Su et al. 2021, "RoFormer").
Free of torch, so that a planner can use it.
"""

from __future__ import annotations

import math

from workers.spec import Yarn

#: YaRN leaves pairs alone that turn this often within the original length, and interpolates those below one turn.
_FAST_TURNS, _SLOW_TURNS = 32, 1


def ntk_base(base: float, factor: float, head_dim: int) -> float:
    """The base that stretches the slowest pair by `factor` and leaves the fastest alone: base * factor^(d/(d-2)).

    "NTK-aware" scaling; Peng et al. 2023 (arXiv 2309.00071), equation 16.

    Raises:
        ValueError: if no float64 holds that base.
    """
    try:
        stretched = base * math.pow(factor, head_dim / (head_dim - 2))
    except OverflowError:
        stretched = math.inf
    if math.isinf(stretched):
        raise ValueError(f"base {base:g} stretched by the factor {factor:g} is above all numbers; lower one of them")
    return stretched


def inverse_frequencies(head_dim: int, base: float, yarn: Yarn | None = None) -> list[float]:
    """Radians per position of each of the `head_dim` / 2 pairs, fastest first."""
    plain = [math.pow(base, -2 * i / head_dim) for i in range(head_dim // 2)]
    if yarn is None:
        return plain
    low, high = yarn_range(head_dim, base, yarn)
    interpolated = (min(1.0, max(0.0, (i - low) / (high - low or 1e-3))) for i in range(len(plain)))
    return [
        (1 - share) * frequency + share * frequency / yarn.factor
        for frequency, share in zip(plain, interpolated, strict=True)
    ]


def yarn_range(head_dim: int, base: float, yarn: Yarn) -> tuple[int, int]:
    """The pairs between which YaRN goes over from untouched to interpolated (arXiv 2309.00071, section 3.2)."""

    def pair_that_turns(times: int) -> float:
        return head_dim * math.log(yarn.original_positions / (times * 2 * math.pi)) / (2 * math.log(base))

    return max(math.floor(pair_that_turns(_FAST_TURNS)), 0), min(math.ceil(pair_that_turns(_SLOW_TURNS)), head_dim - 1)


def yarn_attention_factor(yarn: Yarn | None) -> float:
    """What cosines and sines are multiplied by: 0.1 ln factor + 1, and 1 without interpolation."""
    return 1.0 if yarn is None or yarn.factor <= 1 else 0.1 * math.log(yarn.factor) + 1.0
