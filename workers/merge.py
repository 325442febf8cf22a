"""Observation rules: how checkpoints of one trajectory become the weights that are evaluated.

Tensors are read, combined and handed on one at a time, in blocks (`workers.merge_rules`). Checkpoints are only read:
training goes on from the raw ones. `workers.merged_folder` writes what `merge` yields.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.errors import CheckpointCorruptError, MergeError
from workers.merge_rules import check_rule, merged_blocks
from workers.spec import ObservationRule, RuleName
from workers.weight_files import StoredTensor, WeightFolder

#: Rules whose weights follow from the optimizer steps of the checkpoints.
STEPS_MATTER: frozenset[RuleName] = frozenset({"one_sqrt", "ema"})

#: Files that tell a checkpoint's step, and under which name: ours, and that of transformers' Trainer.
_STEP_FILES = (("state.json", "step"), ("trainer_state.json", "global_step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What a merge will do to each tensor; `averaged` and `copied` together name all of them.

    `steps` are the optimizer steps of the sources, oldest first; their numbers, where the rule looks at no steps.
    `tensors` are those of the newest source.
    """

    sources: tuple[Path, ...]
    rule: ObservationRule
    steps: tuple[int, ...]
    averaged: tuple[str, ...]
    copied: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]


def merge(
    sources: Sequence[Path], rule: ObservationRule, *, steps: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the merged weights, tensor by tensor, sorted by name; nothing is written.

    Floating-point tensors come out as float32 whatever the checkpoints' type, combined in float64 (deltas of `ties` are
    float32). Others (counters, buffers of integers) are copied from the newest checkpoint.

    Args:
        sources: Checkpoint folders, oldest first, as many as the rule takes.
        steps: Optimizer steps of the sources; else what they tell themselves. `one_sqrt` and `ema` need them.

    Raises:
        CheckpointMissingError, CheckpointCorruptError: if a folder holds no readable weights.
        MergeError: if the checkpoints are not of one model, not as many as the rule takes, or not in order.
    """
    return _stream(plan_merge(sources, rule, steps=steps))


def plan_merge(sources: Sequence[Path], rule: ObservationRule, *, steps: Sequence[int] | None = None) -> MergePlan:
    """Reads the headers of all sources and checks that they fit together; raises like `merge`."""
    check_rule(rule)
    wanted = 1 if rule.name == "raw" else rule.m
    if not sources or (wanted and len(sources) != wanted):
        raise MergeError(f"rule {rule.name} takes {wanted or 'some'} checkpoints, {len(sources)} were given")
    with ExitStack() as stack:
        folders = [stack.enter_context(WeightFolder(source)) for source in sources]
    newest = folders[-1]
    for folder in folders[:-1]:
        _check_same_model(folder, newest)
    floating = {name for name, tensor in newest.tensors.items() if tensor.dtype.is_floating_point}
    return MergePlan(
        sources=tuple(sources),
        rule=rule,
        steps=_steps(sources, rule, steps),
        averaged=tuple(sorted(floating)),
        copied=tuple(sorted(newest.tensors.keys() - floating)),
        tensors=newest.tensors,
    )


def merged_tensors(plan: MergePlan) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Each tensor's name and its flat blocks in order; use up the blocks of one before asking for the next."""
    averaged = set(plan.averaged)
    with ExitStack() as stack:
        folders = [stack.enter_context(WeightFolder(source)) for source in plan.sources]
        for name in sorted(plan.tensors):
            numel = plan.tensors[name].numel
            if name in averaged:
                readers = [partial(folder.read, name) for folder in folders]
                yield name, merged_blocks(plan.rule, readers, numel, tensor=name, steps=plan.steps)
            else:
                yield name, iter([folders[-1].read(name, 0, numel)])


def _stream(plan: MergePlan) -> Iterator[tuple[str, Tensor]]:
    for name, blocks in merged_tensors(plan):
        stored = plan.tensors[name]
        tensor = torch.empty(stored.numel, dtype=torch.float32 if stored.dtype.is_floating_point else stored.dtype)
        begin = 0
        for block in blocks:
            tensor[begin : begin + len(block)] = block
            begin += len(block)
        yield name, tensor.view(stored.shape)


def _check_same_model(folder: WeightFolder, newest: WeightFolder) -> None:
    at, other = folder.folder, newest.folder
    rope, newest_rope = rope_parameters(folder.config), rope_parameters(newest.config)
    for name in sorted(rope.keys() | newest_rope.keys()):
        if rope.get(name) != newest_rope.get(name):
            raise MergeError(
                f"{at} rotates positions with {name} = {rope.get(name)}, {other} with {newest_rope.get(name)}:"
                " their weights do not belong to one model"
            )
    if differing := sorted(folder.tensors.keys() ^ newest.tensors.keys()):
        raise MergeError(f"{at} and {other} do not hold the same tensors: {', '.join(differing[:5])}")
    for name, tensor in sorted(folder.tensors.items()):
        expected = newest.tensors[name]
        if tensor.shape != expected.shape:
            raise MergeError(f"{name} has other dimensions in {at} ({tensor.shape}) than in {other} ({expected.shape})")
        if tensor.dtype.is_floating_point != expected.dtype.is_floating_point:
            raise MergeError(f"{name} is {tensor.dtype} in {at} and {expected.dtype} in {other}")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters, flat, whichever layout the config has.

    transformers 5 keeps all of them in `rope_parameters`, by kind of layer where those differ ("full.rope_theta" here);
    before, the base was `rope_theta` at the top and the rest `rope_scaling`, with `type` for `rope_type`.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        elif key != "type":
            flat[key] = value
    if any("." in key for key in flat):
        return flat
    flat.setdefault("rope_type", given.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            flat.setdefault(key, config[key])
    return flat


def checkpoint_steps(sources: Sequence[Path]) -> tuple[int, ...]:
    """The optimizer steps that the checkpoints tell themselves, in state.json or trainer_state.json.

    Raises:
        MergeError: if one has neither.
    """
    return tuple(map(_step_of, sources))


def _steps(sources: Sequence[Path], rule: ObservationRule, given: Sequence[int] | None) -> tuple[int, ...]:
    if rule.name not in STEPS_MATTER:
        return tuple(range(len(sources)))
    steps = tuple(given) if given is not None else checkpoint_steps(sources)
    if len(steps) != len(sources):
        raise MergeError(f"{len(sources)} checkpoints were given, and {len(steps)} steps")
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise MergeError(f"checkpoints must come oldest first; these are of steps {', '.join(map(str, steps))}")
    if rule.name == "ema" and len(steps) > 1 and rule.spacing_steps <= 0:
        raise MergeError(f"ema needs spacing_steps, the steps over which a weight falls to {rule.decay} of it")
    return steps


def _step_of(source: Path) -> int:
    for name, key in _STEP_FILES:
        file = source / name
        if file.is_file():
            try:
                return int(json.loads(file.read_bytes())[key])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointCorruptError(f"{file} does not tell a step: {error}") from error
    raise MergeError(f"{source} has no state.json that tells its optimizer step: give the steps")
