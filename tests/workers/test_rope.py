"""Rotary frequencies against values worked out by hand or in another implementation (d: width of a head)."""

from __future__ import annotations

import math

import pytest

from workers.rope import inverse_frequencies, ntk_base, yarn_attention_factor, yarn_range
from workers.spec import Yarn


@pytest.mark.parametrize(
    ("base", "factor", "head_dim", "expected"),
    [
        (1e4, 4, 128, 40_890),
        (1e4, 8, 128, 82_685),
        (5e5, 4, 128, 2.0445e6),
        (5e5, 8, 128, 4.1342e6),
        (1e4, 4, 64, 41_829),
    ],
)
def test_ntk_base_of_known_extensions(base: float, factor: float, head_dim: int, expected: float) -> None:
    assert ntk_base(base, factor, head_dim) == pytest.approx(expected, rel=5e-5)


def test_ntk_base_stretches_the_slowest_pair_by_the_factor_and_leaves_the_fastest() -> None:
    before, after = inverse_frequencies(128, 1e4), inverse_frequencies(128, ntk_base(1e4, 8, 128))
    assert before[0] == after[0] == 1
    assert before[-1] / after[-1] == pytest.approx(8)


@pytest.mark.parametrize(("base", "wavelength"), [(1e4, 54_410), (5e5, 2.56e6), (5e6, 2.47e7), (1.28e8, 6.0e8)])
def test_longest_wavelengths(base: float, wavelength: float) -> None:
    assert 2 * math.pi / inverse_frequencies(128, base)[-1] == pytest.approx(wavelength, rel=5e-3)


def test_yarn_of_a_wide_head() -> None:
    yarn = Yarn(factor=4.0, original_positions=4096)
    frequencies = inverse_frequencies(128, 1e4, yarn)
    assert yarn_range(128, 1e4, yarn) == (20, 46)
    assert yarn_attention_factor(yarn) == pytest.approx(1.138629, abs=1e-6)
    known = {0: 1.0, 20: 0.0562341, 33: 0.00541228, 46: 3.33380e-4, 63: 2.88695e-5}
    for pair, frequency in known.items():
        assert frequencies[pair] == pytest.approx(frequency, rel=1e-5), pair


def test_yarn_of_a_narrow_head() -> None:
    yarn = Yarn(factor=4.0, original_positions=1024)
    assert yarn_range(8, 1e4, yarn) == (0, 3)
    assert inverse_frequencies(8, 1e4, yarn) == pytest.approx([1, 0.075, 0.005, 0.00025], rel=1e-9)


def test_a_factor_of_one_changes_nothing() -> None:
    yarn = Yarn(factor=1.0, original_positions=1024)
    assert inverse_frequencies(64, 1e4, yarn) == pytest.approx(inverse_frequencies(64, 1e4), rel=1e-12)
    assert yarn_attention_factor(yarn) == yarn_attention_factor(None) == 1


def test_a_base_above_all_numbers_is_refused() -> None:
    for base, factor in ((1e4, 1e300), (1e300, 1e10)):
        with pytest.raises(ValueError, match="lower one of them"):
            ntk_base(base, factor, head_dim=4)
