"""Weights of a folder, in one file or in shards: what is read is what was saved, and contradictions are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.merge_folders import folder_of, sharded_folder_of
from workers.errors import CheckpointCorruptError, CheckpointMissingError
from workers.merge import merge
from workers.spec import ObservationRule
from workers.weight_files import DTYPE_NAMES, WeightFolder, safetensors_header

A = {"a": torch.arange(6.0).view(2, 3)}
B = {"b": torch.tensor([1.5, -2.0, 0.25, 8.0, -1.0]).bfloat16()}
C = {"c": torch.tensor([7])}
TIES = ObservationRule(name="ties", m=2, density=0.5)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_part_of_a_tensor_reads_as_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = torch.arange(24).view(4, 6).to(dtype)
    with WeightFolder(folder_of(tmp_path / "whole", {"before": torch.ones(3), "w": saved})) as folder:
        assert folder.tensors["w"].shape == (4, 6)
        flat = saved.view(-1)
        for begin, end in ((0, 24), (0, 1), (5, 17), (23, 24), (7, 7)):
            found = folder.read("w", begin, end)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), flat[begin:end].view(torch.uint8))


def test_shards_read_like_one_file_however_each_checkpoint_is_cut(tmp_path: Path) -> None:
    later = [{name: tensor * 3 for name, tensor in shard.items()} for shard in (A, B, C)]
    whole = [folder_of(tmp_path / "0", A | B | C), folder_of(tmp_path / "1", later[0] | later[1] | later[2])]
    cut = [
        sharded_folder_of(tmp_path / "2", [A, B | C]),
        sharded_folder_of(tmp_path / "3", [later[2], later[0] | later[1]]),
    ]
    one, other = dict(merge(whole, TIES)), dict(merge(cut, TIES))
    assert list(one) == list(other) == ["a", "b", "c"]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = sharded_folder_of(tmp_path / "cut", [A, B])
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointMissingError, match=r"lacks model-00002-of-00002\.safetensors"):
        WeightFolder(source)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}, "do not agree on b, x"),
        ({"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}, "do not agree on a, b"),
        ({"a": "../model-00001-of-00002.safetensors"}, "names files outside its folder"),
        (None, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_tell_what_the_shards_hold_is_refused(
    tmp_path: Path, weight_map: dict[str, str] | None, message: str
) -> None:
    source = sharded_folder_of(tmp_path / "cut", [A, B])
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointCorruptError, match=message):
        WeightFolder(source)


def test_one_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    source = sharded_folder_of(tmp_path / "cut", [A, B])
    (source / "model-00001-of-00002.safetensors").rename(source / "model.safetensors")
    with pytest.raises(CheckpointCorruptError, match="holds both"):
        WeightFolder(source)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "whole", A)
    for text in ("[]", "{", ""):
        (source / "config.json").write_text(text)
        with pytest.raises(CheckpointCorruptError, match=r"config\.json"):
            WeightFolder(source)


def test_the_header_we_write_is_the_formats(tmp_path: Path) -> None:
    tensors = {**A, **B, **C}
    header = safetensors_header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    data = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    (tmp_path / "file.safetensors").write_bytes(header + data)
    found = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
