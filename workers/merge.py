"""Observation rules: how checkpoints of one trajectory become the weights that are evaluated.

Tensors are read, combined and handed on one at a time. Checkpoints are only read: training goes on from the raw ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.checkpoint import CONFIG, WEIGHTS
from workers.errors import CheckpointCorruptError, CheckpointMissingError, MergeError
from workers.spec import ObservationRule, RuleName

#: Combines one tensor of every source, oldest first, into one of float32.
Combine = Callable[[Iterable[Tensor], ObservationRule], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What a merge will do to each tensor; `averaged` and `copied` together name all of them."""

    sources: tuple[Path, ...]
    rule: ObservationRule
    averaged: tuple[str, ...]
    copied: tuple[str, ...]


def merge(sources: Sequence[Path], rule: ObservationRule) -> Iterator[tuple[str, Tensor]]:
    """Yields the merged weights, tensor by tensor, sorted by name.

    Floating-point tensors come out as float32 whatever the checkpoints' type, combined in float64. Others (counters,
    buffers of integers) are copied from the newest checkpoint.

    Args:
        sources: Checkpoint folders, oldest first, as many as the rule takes.

    Raises:
        CheckpointMissingError, CheckpointCorruptError: if a folder holds no readable weights.
        MergeError: if the checkpoints are not of one model, or not as many as the rule takes.
    """
    return _stream(plan_merge(sources, rule))


def plan_merge(sources: Sequence[Path], rule: ObservationRule) -> MergePlan:
    """Reads the headers of all sources and checks that they fit together; raises like `merge`."""
    if rule.name not in _COMBINE:
        raise MergeError(f'no observation rule "{rule.name}"; there is {", ".join(_COMBINE)}')
    if len(sources) != rule.m:
        raise MergeError(f"rule {rule.name} takes {rule.m} checkpoints, {len(sources)} were given")
    headers = [_read_header(source) for source in sources]
    newest = headers[-1]
    for source, header in zip(sources, headers, strict=True):
        if header.rope != newest.rope:
            raise MergeError(
                f"{source} rotates positions with {header.rope}, {sources[-1]} with {newest.rope}:"
                " their weights do not belong to one model"
            )
        differing = sorted(header.tensors.keys() ^ newest.tensors.keys())
        if differing:
            raise MergeError(f"{source} and {sources[-1]} do not hold the same tensors: {', '.join(differing[:5])}")
        for name, description in header.tensors.items():
            if description.shape != newest.tensors[name].shape:
                raise MergeError(f"{name} has other dimensions in {source} than in {sources[-1]}")
    averaged = tuple(sorted(name for name, description in newest.tensors.items() if description.floating))
    copied = tuple(sorted(newest.tensors.keys() - set(averaged)))
    return MergePlan(sources=tuple(sources), rule=rule, averaged=averaged, copied=copied)


def _stream(plan: MergePlan) -> Iterator[tuple[str, Tensor]]:
    combine, averaged = _COMBINE[plan.rule.name], set(plan.averaged)
    with ExitStack() as stack:
        files = [stack.enter_context(_open(source)) for source in plan.sources]
        for name in sorted((*plan.averaged, *plan.copied)):
            if name in averaged:
                yield name, combine((file.get_tensor(name) for file in files), plan.rule)
            else:
                yield name, files[-1].get_tensor(name)


def _mean(tensors: Iterable[Tensor], rule: ObservationRule) -> Tensor:
    """1/m on each; float64 keeps the mean of equal checkpoints equal to them to the last bit."""
    total: Tensor | None = None
    for tensor in tensors:
        total = tensor.double() if total is None else total.add_(tensor)
    assert total is not None
    return total.div_(rule.m).float()


_COMBINE: dict[RuleName, Combine] = {"raw": _mean, "last_m": _mean}


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    shape: tuple[int, ...]
    floating: bool


@dataclass(frozen=True, slots=True)
class _Header:
    tensors: dict[str, _TensorHeader]
    rope: dict[str, Any] | None


def _open(source: Path) -> Any:
    file = source / WEIGHTS
    if not file.is_file():
        raise CheckpointMissingError(f"{source} holds no {WEIGHTS}")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{file} is unreadable: {error}") from error


def _read_header(source: Path) -> _Header:
    with _open(source) as file:
        tensors = {}
        for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
            part = file.get_slice(name)
            # F64, F32, F16, BF16, F8_E4M3, ... against I64, U8, BOOL
            tensors[name] = _TensorHeader(tuple(part.get_shape()), "F" in part.get_dtype())
    try:
        config = json.loads((source / CONFIG).read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointCorruptError(f"{source / CONFIG} is missing or unreadable: {error}") from error
    return _Header(tensors, rope=config.get("rope_parameters"))
