"""How long LongPPL takes, and how much memory, beside the definition written out plainly.

``python -m benchmarks.evaluation [--json]`` prints and writes nothing. One model is reference and evaluated model at
once, under the windows of the public implementation. "Plain" computes all logits of one window at a time. Each way runs
in a process of its own with one thread; machines are shared, so CPU time is compared, and peak memory above what the
process held before it began.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from workers.key_tokens import key_mask, short_mask
from workers.longppl import pool, score_documents
from workers.model import build_model
from workers.reference_cache import KeyTokens
from workers.spec import Chunking, ModelShape
from workers.token_losses import full_losses, local_losses

SHAPE = ModelShape(layers=2, width=64, heads=2, kv_heads=2, ffn_width=192, vocab_size=16_384, init_std=0.1)
LENGTH = 8192
CHUNKING = Chunking(length=4096, stride=1024, mode="pku")
#: An untrained model gains nothing from distant context: low thresholds make it select a few tokens all the same.
GAIN_THRESHOLD, FULL_NLL_CEILING = 0.02, 9.5
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    keys: list[int]
    log_longppl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one way of measuring one document took, and what it found; `keys` is the sha256 of the key positions."""

    cpu_s: float
    peak_memory_bytes: int
    log_longppl: float
    key_count: int
    keys: str


def ours(model: torch.nn.Module, ids: npt.NDArray[np.int64]) -> Found:
    full = full_losses(model, [ids])
    (local,) = local_losses(model, [ids], CHUNKING)
    key = key_mask(full[0], local, gain_threshold=GAIN_THRESHOLD, full_nll_ceiling=FULL_NLL_CEILING)
    evaluation = pool(score_documents(full, [KeyTokens(key=key, short=short_mask(full[0], local))]))
    assert evaluation.log_longppl is not None
    return Found(keys=np.flatnonzero(key).tolist(), log_longppl=evaluation.log_longppl)


@torch.inference_mode()
def plain(model: torch.nn.Module, ids: npt.NDArray[np.int64]) -> Found:
    """log P of each token from the whole logits of its window, one window after another."""
    tokens = torch.from_numpy(ids)

    def log_probabilities(first: int, end: int) -> torch.Tensor:
        logits = model(input_ids=tokens[None, first:end], use_cache=False).logits[0].float()
        every = functional.log_softmax(logits, dim=-1)
        return every[:-1].gather(1, tokens[first + 1 : end, None])[:, 0]

    full = torch.cat([torch.zeros(1), log_probabilities(0, len(tokens))])
    chosen = []
    for first in range(0, len(tokens) - CHUNKING.length, CHUNKING.stride):
        end = min(first + CHUNKING.length + CHUNKING.stride, len(tokens))
        local = log_probabilities(first, end)[CHUNKING.length - 1 :]
        scored = full[first + CHUNKING.length : end]
        is_key = (scored - local > GAIN_THRESHOLD) & (scored > -FULL_NLL_CEILING)
        chosen.append(first + CHUNKING.length + is_key.nonzero()[:, 0])
    keys = torch.cat(chosen)
    return Found(keys=keys.tolist(), log_longppl=float(-full[keys].double().mean()))


WAYS: dict[str, Callable[[torch.nn.Module, npt.NDArray[np.int64]], Found]] = {"ours": ours, "plain": plain}


def measure_here(way: str) -> Cost:
    """Measures one random document in this process; its peak memory so far must be that of the loaded model."""
    torch.set_num_threads(1)
    model = build_model(SHAPE, rope_base=1e5, max_positions=LENGTH, seed=0).eval()
    ids = np.random.default_rng(0).integers(0, SHAPE.vocab_size, LENGTH)
    before, started = _peak_bytes(), time.process_time()
    found = WAYS[way](model, ids)
    return Cost(
        cpu_s=time.process_time() - started,
        peak_memory_bytes=_peak_bytes() - before,
        log_longppl=found.log_longppl,
        key_count=len(found.keys),
        keys=hashlib.sha256(json.dumps(found.keys).encode()).hexdigest(),
    )


def measure_apart(way: str) -> Cost:
    """Measures one way in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.evaluation", "--way", way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the comparison as a table, or as JSON."""
    parser = argparse.ArgumentParser(description="LongPPL beside its definition written out plainly.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--way", choices=sorted(WAYS), help="measure this way alone, here, and print its cost")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(asdict(measure_here(options.way))))
        return
    found = {way: [measure_apart(way) for _ in range(REPEATS)] for way in WAYS}
    best = {way: min(costs, key=lambda cost: cost.cpu_s) for way, costs in found.items()}
    result = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "reference_time_ratio": best["plain"].cpu_s / best["ours"].cpu_s,
        "reference_memory_ratio": best["plain"].peak_memory_bytes / best["ours"].peak_memory_bytes,
        "same_key_tokens": len({cost.keys for cost in best.values()}) == 1,
        **{way: asdict(cost) for way, cost in best.items()},
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("way", "CPU s", "peak memory, MiB", "log LongPPL", "key tokens")
    for way, cost in best.items():
        memory = f"{cost.peak_memory_bytes / 2**20:,.0f}"
        table.add_row(way, f"{cost.cpu_s:.2f}", memory, f"{cost.log_longppl:.6f}", str(cost.key_count))
    Console().print(table)
    Console().print(
        f"plain / ours: time {result['reference_time_ratio']:.2f}, memory {result['reference_memory_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
