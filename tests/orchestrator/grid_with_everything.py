"""A grid document that gives every key at least once, for tests that change one of them."""

from __future__ import annotations

import copy
from typing import Any

from tests.orchestrator.small_grid import small_document

_DATA: dict[str, Any] = {
    "packing": "documents",
    "min_document_tokens": 3,
    "full_length_share": 0.5,
    "copied_spans": 0.1,
    "blended": [{"corpus": "z", "split": "short", "share": 0.2, "copied_spans": 0.1, "min_document_tokens": 2}],
}
_MUON: dict[str, Any] = {
    "name": "muon",
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1,
    "rate_ratio": 2,
    "momentum": 0.9,
    "nesterov": True,
    "newton_schulz_steps": 5,
    "scaling": "original",
}
_STAGE: dict[str, Any] = {
    "final_rate_ratio": 0.1,
    "decay_shape": "cosine",
    "z_loss": 1e-4,
    "precision": "fp32",
    "optimizer": _MUON,
    **_DATA,
}
_PROBES: dict[str, Any] = {
    "at": "cells",
    "seed": 1,
    "documents": {"count": 1, "length": 64, "min_length": 3, "corpus": "q"},
    "run": [
        {"kind": "position_loss", "bins_per_doubling": 1},
        {"kind": "passkey", "lengths": [64], "depths": [0, 1], "samples": 2},
        {"kind": "needle_loss", "lengths": [64], "depths": [0.5], "samples": 2, "distractors": 1},
        {
            "kind": "retrieval_heads",
            "length": 64,
            "depths": [0.5],
            "samples": 1,
            "threshold": 0.1,
            "tracked": ["0.0"],
        },
        {
            "kind": "ruler",
            "length": 4096,
            "tasks": ["vt", "qa_1"],
            "samples": 2,
            "qa_1": {"path": "/questions", "digest": "d"},
        },
    ],
}
_EVALUATION: dict[str, Any] = {
    "reference": {"kind": "huggingface", "path": "/reference", "digest": "d"},
    "documents": {"count": 2, "length": 64, "min_length": 10, "corpus": "c"},
    "chunking": {"length": 8, "stride": 4, "mode": "pku"},
    "gain_threshold": 2,
    "full_nll_ceiling": 2,
    "short_context_gap": True,
    "probes": _PROBES,
}
_MERGING = [
    {"name": "last_m", "m": 2, "spacing": 16, "pool": "twos"},
    {"name": "one_sqrt", "spacing": 16},
    {"name": "ema", "m": 2, "spacing": 32, "decay": 0.5},
    {"name": "dare", "spacing": 32, "density": 0.5},
    {"name": "ties", "spacing": 16, "density": 0.5},
]
_FOLDER = {
    "digest": "ab" * 32,
    "n_params": 1000,
    "embedding_params": 100,
    "layers": 2,
    "width": 8,
    "vocab_size": 32,
    "head_dim": 4,
    "rope_base": 10_000,
}


def document_with_everything(*, constant: bool = True) -> dict[str, Any]:
    """A shape and a model of unknown D_s, three phases, all rules, follow-ups and probes; it plans.

    What only a constant rate can give is left out otherwise.
    """
    phases = [
        {"until": 80, "seq_len": 8, "batch_sequences": 2, "rope": {"method": "abf", "base": 20_000}, "corpus": "w"},
        {"until": 240, "rope_base": 30_000, **_DATA},
        {"seq_len": 4},
    ]
    everywhere = {"diagnose_zero": True} | ({"every": 32} if constant else {})
    document = small_document(
        protocol="constant" if constant else "linear_decay",
        scales={
            "a": {
                "layers": 1,
                "width": 16,
                "heads": 2,
                "kv_heads": 1,
                "ffn_width": 8,
                "short": {"peak_rate": 0.02, "optimizer": {"beta1": 0.8}},
                "long": {"start_rate": 0.01, "warmup_steps": 1},
                "execution": {"processes": 1},
            },
            "m": {"model": _FOLDER, "short_tokens_seen": "unknown", "long": {"start_rate": 0.01}},
        },
        product_scales=["a", "m"],
        short_tokens={"default": [720, 1440]},
        long_tokens={"default": [160, 320], "m": [160]},
        seeds={"short": [0, 1], "long": [0]},
        rules=[{"name": "raw"}, *(_MERGING if constant else [])],
        cells=[
            {
                "scale": "a",
                "short_tokens": "2160",
                "long_tokens": [160, 320],
                "seeds": {"long": [3], "short": [2]},
                "rules": [{"name": "raw"}],
                **({"evaluate_every": 16} if constant else {}),
            },
            {"scale": "m", "long_tokens": 480},
        ],
        follow_ups=[
            {
                "name": "f",
                "from": _MERGING[0] if constant else {"name": "raw"},
                "at": [160],
                "scales": ["a"],
                "tokens": 160,
                "seq_len": 16,
                "batch_sequences": 1,
                "rope": {"method": "ntk", "factor": 2, "base": 10_000, "original_length": 16},
                "start_rate": 0.001,
                "optimizer_state": "fresh",
                "warmup_steps": 1,
                "corpus": "d",
                "split": "short",
                "evaluation": _EVALUATION,
                **{key: value for key, value in _STAGE.items() if key != "optimizer"},
            },
            {"name": "g", "from": {"name": "raw"}, "tokens": 160, "rope_base": 1e6},
        ],
        evaluation=_EVALUATION | everywhere,
        rounding_tolerance=0.2,
        fit={"holdout": "scale=a", "bootstrap": 10},
        cost={"gpu_flops": 1e12, "gpu_utilisation": 0.5},
        budget={"gpu_hours": 1},
        execution={"processes": 1, "sharding": "replicate", "micro_batch_tokens": 64, "recompute_activations": True},
    )
    recipe = document["recipe"]
    recipe["model"] |= {"tied_embeddings": True, "init_std": 0.02, "norm_eps": 1e-5}
    recipe["model"]["attention"] = {"qk_conv_kernel": 3}
    recipe["short"] |= {"rope_base": 10_000, **_STAGE}
    recipe["long"] = {
        "seq_len": 16,
        "batch_sequences": 1,
        "start_rate": "inherit",
        "optimizer_state": "carry",
        "warmup_steps": 0,
        "rope": {"method": "yarn", "factor": 2, "base": 10_000, "original_length": 8},
        "stages": phases,
        **_STAGE,
    }
    return copy.deepcopy(document)  # no part stands in two places
