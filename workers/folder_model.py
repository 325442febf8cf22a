"""Models that somebody else trained: any Hugging Face causal language model folder, kept in the store by its digest.

    <store>/models/<digest>/
        config.json            as it was found
        *.safetensors          the weights, with their index where they are in several files
        manifest.json          size and SHA-256 of each file above; its own SHA-256 is the model's digest

Nothing in a folder is executed: no code of its own, no pickles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers import mirror
from workers.errors import ModelMismatchError, ModelMissingError
from workers.mirror import MANIFEST
from workers.spec import FolderModel, canonical_json
from workers.weight_files import CONFIG

_FOLDER = "models"
#: What belongs to the architecture and not to a length.
_KEPT_OF_ROPE = ("partial_rotary_factor",)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def add_model(folder: Path, store: Path) -> FolderModel:
    """Brings a model into the store and counts it; the same files give the same digest, wherever they lay.

    Files are linked where the file system can, else copied. A model that is there already stays as it is.

    Raises:
        ModelMissingError: if there is no config.json, or no weights in safetensors.
        ModelMismatchError: if it needs code of its own, is no causal language model, or lacks weights.
    """
    names = _files(folder)
    manifest = canonical_json({"files": {name: _entry(folder / name) for name in names}}).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    shape = _measured(_load(folder, dtype="auto"), digest)
    home = store / _FOLDER / digest
    if not home.is_dir():
        building = home.with_name(f".{digest}-{uuid.uuid4().hex}.unfinished")
        building.mkdir(parents=True)
        try:
            for name in names:
                _link((folder / name).resolve(), building / name)
            (building / MANIFEST).write_bytes(manifest)
            building.rename(home)
        except OSError:
            if not home.is_dir():  # else another process has brought the same model
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    verify_folder(store, shape)
    mirror.publish(store, f"{_FOLDER}/{digest}")
    return shape


def verify_folder(store: Path, shape: FolderModel) -> Path:
    """The folder of a model in the store, after every byte of it was compared with the digest.

    Raises:
        ModelMissingError: if it is not there.
        ModelMismatchError: if it is not what the digest says.
    """
    home = store / _FOLDER / shape.digest
    mirror.fetch(store, f"{_FOLDER}/{shape.digest}")
    try:
        manifest = (home / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelMissingError(f"no model {shape.digest} in {store}: `longlaw model add FOLDER` brings one") from None
    if hashlib.sha256(manifest).hexdigest() != shape.digest:
        raise ModelMismatchError(f"{home / MANIFEST} does not have the digest {shape.digest}")
    for name, entry in json.loads(manifest)["files"].items():
        if not (home / name).is_file() or _entry(home / name) != entry:
            raise ModelMismatchError(f"{home / name} is not what the manifest says: remove {home} and add it again")
    return home


def load_folder(
    store: Path, shape: FolderModel, *, rope_parameters: dict[str, Any], max_positions: int
) -> PreTrainedModel:
    """The model of a folder in float32 on the CPU, with another RoPE than it came with.

    Raises:
        ModelMissingError: if it is not in the store.
        ModelMismatchError: if it is not what the digest says, or does not have the sizes of `shape`.
    """
    home = verify_folder(store, shape)
    own = getattr(_load_config(home), "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in own.values()):
        raise ModelMismatchError(
            f"the model {shape.digest} rotates differently in layers of different kinds ({', '.join(own)}); one RoPE"
            " base needs one"
        )
    kept = {name: own[name] for name in _KEPT_OF_ROPE if name in own}
    model = _load(
        home,
        dtype=torch.float32,
        attn_implementation="sdpa",
        rope_parameters=rope_parameters | kept,
        max_position_embeddings=max_positions,
    )
    found = _measured(model, shape.digest)
    if shape.attention_width is None:  # a price was made without it; nothing else is
        found = dataclasses.replace(found, attention_width=None)
    if found != shape:
        raise ModelMismatchError(f"the model {shape.digest} is {found}, {shape} was asked for")
    return model


def counted(model: PreTrainedModel) -> tuple[int, int]:
    """N and the parameters outside of it: the input embedding and the output head, once where they are tied."""
    outside = {id(part.weight): part.weight for part in _ends(model)}
    n_params = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outside)
    return n_params, sum(weight.numel() for weight in outside.values())


def own_rope(model_folder: Path) -> tuple[int, float | None]:
    """The rotating channels of a head, and the RoPE base that a model came with; None where it has no single base."""
    config = _load_config(model_folder)
    rope = getattr(config, "rope_parameters", None) or {}
    base = rope.get("rope_theta")
    return int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)), None if base is None else float(base)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _measured(model: PreTrainedModel, digest: str) -> FolderModel:
    n_params, embedding_params = counted(model)
    vocab_size, width = _ends(model)[0].weight.shape
    attention_width = _head_dim(model.config) * int(model.config.num_attention_heads)
    return FolderModel(
        digest=digest,
        n_params=n_params,
        embedding_params=embedding_params,
        layers=int(model.config.num_hidden_layers),
        width=int(width),
        vocab_size=int(vocab_size),
        attention_width=None if attention_width == width else attention_width,
    )


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(getattr(end, "weight", None) is None for end in ends):
        raise ModelMismatchError(f"{type(model).__name__} has no input embedding and output head to tell apart")
    return ends


def _load_config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _load(folder: Path, **options: Any) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ModelMismatchError(f"{folder} is not a causal language model that can be loaded: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:5])
            raise ModelMismatchError(f"{folder}: weights and config.json do not agree: {problem} {names}")
    loaded: PreTrainedModel = model
    return loaded


def _files(folder: Path) -> list[str]:
    if not (folder / CONFIG).is_file():
        raise ModelMissingError(f"{folder} has no {CONFIG}: it is no Hugging Face model folder")
    weights = sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not any(name.endswith(".safetensors") for name in weights):
        raise ModelMissingError(f"{folder} has no weights in safetensors; convert them first, pickles are never read")
    return [CONFIG, *weights]


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"sha256": hashlib.file_digest(content, "sha256").hexdigest(), "size_bytes": file.stat().st_size}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
