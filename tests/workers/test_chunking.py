"""Windows of local context: oracle O4 of the public implementation (mode `pku`), and `exact` on the same lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.chunking import chunk_windows, context_starts
from workers.spec import Chunking, ChunkingMode


def windows(n_tokens: int, mode: ChunkingMode, length: int = 4096, stride: int = 1024) -> list[tuple[int, int, int]]:
    plan = chunk_windows(n_tokens, Chunking(length=length, stride=stride, mode=mode))
    return [(window.start, window.first, window.end) for window in plan]


def test_pku_windows_are_those_of_the_public_implementation() -> None:
    """O4; 5121 leaves a last window of one token, which crashes the public code."""
    assert windows(6000, "pku") == [(0, 4096, 5120), (1024, 5120, 6000)]
    assert windows(5121, "pku") == [(0, 4096, 5120), (1024, 5120, 5121)]
    assert windows(5120, "pku") == [(0, 4096, 5120)]
    assert windows(4096, "pku") == []


def test_exact_windows_begin_where_the_chunk_is_shorter_than_the_prefix() -> None:
    """O4's lengths under the default mode."""
    assert windows(6000, "exact") == [(1, 4097, 5121), (1025, 5121, 6000)]
    assert windows(5121, "exact") == [(1, 4097, 5121)]
    assert windows(5120, "exact") == [(1, 4097, 5120)]
    assert windows(4097, "exact") == []


@pytest.mark.parametrize(
    ("n_tokens", "length", "stride", "count", "fed"),
    [
        (4096, 4096, 1024, 0, 0),
        (8192, 4096, 1024, 4, 20_480),
        (16384, 4096, 1024, 12, 61_440),
        (32768, 4096, 1024, 28, 143_360),
        (1024, 128, 32, 28, 28 * 160),
        (4096, 512, 128, 28, 28 * 640),
    ],
)
def test_pku_windows_cost_what_the_public_implementation_costs(
    n_tokens: int, length: int, stride: int, count: int, fed: int
) -> None:
    plan = windows(n_tokens, "pku", length, stride)
    assert len(plan) == count
    assert sum(end - start for start, _, end in plan) == fed


@given(n_tokens=st.integers(0, 90), length=st.integers(1, 20), stride=st.integers(1, 20))
def test_exact_gives_every_later_token_one_context_of_the_promised_length(
    n_tokens: int, length: int, stride: int
) -> None:
    chunking = Chunking(length=length, stride=stride)
    scored = [position for window in chunk_windows(n_tokens, chunking) for position in range(window.first, window.end)]
    assert scored == list(range(length + 1, n_tokens))
    starts = context_starts(n_tokens, chunking)
    context = np.arange(n_tokens) - starts
    assert (starts[: length + 1] == 0).all()
    assert (starts[length + 1 :] > 0).all()
    assert ((context[length + 1 :] >= length) & (context[length + 1 :] < length + stride)).all()
    assert (np.diff(starts) >= 0).all()


def test_the_first_pku_window_counts_as_the_whole_prefix() -> None:
    assert context_starts(9, Chunking(length=2, stride=3, mode="pku")).tolist() == [0, 0, 0, 0, 0, 3, 3, 3, 6]


@pytest.mark.parametrize(("length", "stride"), [(0, 1), (1, 0), (-1, 1)])
def test_lengths_that_are_not_positive_are_refused(length: int, stride: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        chunk_windows(10, Chunking(length=length, stride=stride))
