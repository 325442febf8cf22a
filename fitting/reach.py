"""How far points lie outside of what was fitted, what the observations leave open there, and how both are said."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from fitting.identifiability import VARIED_RATIO
from fitting.laws import Law
from fitting.values import FittedLaw, FloatArray

BoolArray = NDArray[np.bool_]
#: N, D_s and D_l of m points: each (m), or (1) where one number holds for all of them.
Sizes = tuple[FloatArray, FloatArray, FloatArray]

_TEXTS = np.dtype(object)


def extrapolation(law: FittedLaw, form: Law, sizes: Sizes) -> Sizes:
    """How many times beyond its fitted span each size lies, 1 inside; axes that no term uses are nowhere outside."""
    ratios = []
    for axis, (size, seen) in enumerate(zip(sizes, law.ranges.axes, strict=True)):
        with np.errstate(over="ignore"):
            ratio = np.maximum(np.maximum(size / seen.high, seen.low / size), 1.0)
        ratios.append(ratio if axis in form.axes else np.ones(1))
    n_params, short_tokens, long_tokens = ratios
    return n_params, short_tokens, long_tokens


def open_axes(law: FittedLaw, form: Law, sizes: Sizes) -> list[tuple[str, BoolArray]]:
    """The axes along which values are open because their exponent is not identifiable, each with where: (m) or (1).

    The value is still known where the axis was observed. For an axis that was not varied that is its range; else it is
    the ends of the range, which with two values of an axis, the usual cause, is all there is. With two such axes which
    of their combinations were observed is not at hand, so none is taken for known. An absent term is no obstacle: its
    exponent has no effect. A term of two axes has no range at hand, so it is open everywhere.
    """
    found: list[tuple[str, BoolArray]] = []
    wide: list[tuple[str, BoolArray]] = []
    spans = law.ranges.axes
    for term in form.terms:
        if form.parameter_names[term.exponent] not in law.not_identifiable:
            continue
        symbol = " + ".join(form.symbols[axis] for axis in term.axes)
        size, seen = sizes[term.axes[0]], spans[term.axes[0]]
        if len(term.axes) > 1:
            if law.parameters[term.amplitude] > 0:
                found.append((symbol, np.array([True])))
        elif seen.high <= VARIED_RATIO * seen.low:
            found.append((symbol, (size < seen.low) | (size > seen.high)))
        elif law.parameters[term.amplitude] > 0:
            wide.append((symbol, (size != seen.low) & (size != seen.high)))
    if len(wide) > 1:
        wide = [(symbol, np.array([True])) for symbol, _ in wide]
    return found + wide


def anywhere(where: Sequence[tuple[str, BoolArray]]) -> BoolArray:
    """Where any of several conditions holds: (m) or (1)."""
    return reduce(np.logical_or, (condition for _, condition in where), np.array([False]))


def warnings(
    law: FittedLaw,
    form: Law,
    sizes: Sizes,
    ratios: Sizes,
    is_open: Sequence[tuple[str, BoolArray]],
    values: FloatArray,
) -> list[tuple[str, ...]]:
    """What a reader of each value should know: m tuples of texts, most of them empty.

    A text is put together once for each different number in it, not for each point.
    """
    columns = []
    for axis in form.axes:
        symbol, size, ratio, seen = form.symbols[axis], sizes[axis], ratios[axis], law.ranges.axes[axis]
        above = f"{symbol} is {{:.3g}} times the largest one fitted; the law has a finite range"
        columns.append(_texts(size > seen.high, ratio, above))
        columns.append(_texts(size < seen.low, ratio, f"{symbol} is {{:.3g}} times below the smallest one fitted"))
    columns.append(_open_texts(is_open))
    columns.append(_texts(values < 0, values, "a LongPPL below 1 is impossible: the law is used outside its range"))
    said = [np.broadcast_to(column, values.shape).tolist() for column in columns if column.any()]
    return [tuple(filter(None, texts)) for texts in zip(*said, strict=True)] if said else [()] * values.size


def _texts(where: BoolArray, numbers: FloatArray, template: str) -> NDArray[np.object_]:
    texts = np.full(where.shape, "", dtype=_TEXTS)
    different, which = np.unique(numbers[where], return_inverse=True)
    texts[where] = np.array([template.format(number) for number in different.tolist()], dtype=_TEXTS)[which]
    return texts


def _open_texts(is_open: Sequence[tuple[str, BoolArray]]) -> NDArray[np.object_]:
    """One of the few texts that there are: one for each set of axes that is open somewhere."""
    which = np.zeros(1, dtype=np.intp)
    texts = [""]
    for position, (_, where) in enumerate(is_open):
        which = which + (where.astype(np.intp) << position)
    for chosen in range(1, 1 << len(is_open)):
        axes = " and ".join(symbol for position, (symbol, _) in enumerate(is_open) if chosen >> position & 1)
        texts.append(f"the observations leave this value open: they vary {axes} too little, or only together")
    return np.array(texts, dtype=_TEXTS)[which]
