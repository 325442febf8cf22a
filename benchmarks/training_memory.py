"""Peak memory of one training step with a large vocabulary: ours beside the plain one.

``python -m benchmarks.training_memory STEP TOKENS`` makes one step (forward, backward, AdamW) of a small Llama with
131,072 tokens in its vocabulary on one sequence and prints what the process held, as JSON. STEP is "ours", or "plain":
Hugging Face's loss of full logits. A process of its own for each, because a peak cannot be forgotten (Linux).
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from workers.loss import NextTokenLoss
from workers.model import build_model
from workers.optimizers import build_optimizers, set_rate
from workers.spec import AdamW, ModelShape

Step = Literal["ours", "plain"]

VOCAB_SIZE = 131_072
#: Of full logits only what 4,096 tokens need is affordable: 2 GiB, three times over.
RUNS: tuple[tuple[Step, int], ...] = (("plain", 4096), ("ours", 4096), ("ours", 32_768))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Resident memory of the process before the step (model and libraries), and the most it had by its end."""

    step: Step
    tokens: int
    vocab_size: int
    before_bytes: int
    peak_bytes: int


def measure_all() -> list[Peak]:
    """Every run of `RUNS`, each in a process of its own."""
    peaks = []
    for step, tokens in RUNS:
        command = [sys.executable, "-m", "benchmarks.training_memory", step, str(tokens)]
        peaks.append(Peak(**json.loads(subprocess.run(command, check=True, capture_output=True).stdout)))
    return peaks


def measure(step: Step, tokens: int) -> Peak:
    """One step in this process."""
    shape = ModelShape(layers=2, width=64, heads=2, kv_heads=2, ffn_width=192, vocab_size=VOCAB_SIZE)
    model = build_model(shape, rope_base=1e4, max_positions=tokens, seed=0)
    optimizers = build_optimizers(model, AdamW())
    set_rate(optimizers, 1e-3)
    ids = torch.randint(VOCAB_SIZE, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    before_bytes = _status_bytes("VmRSS")
    if step == "ours":
        loss, _ = NextTokenLoss(model)(ids[:, :-1], ids[:, 1:], 1 / tokens)
    else:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return Peak(
        step=step, tokens=tokens, vocab_size=VOCAB_SIZE, before_bytes=before_bytes, peak_bytes=_status_bytes("VmHWM")
    )


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"this system does not tell {field}: the benchmark needs Linux")


def main() -> None:
    """Print one measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("step", choices=get_args(Step))
    parser.add_argument("tokens", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(asdict(measure(arguments.step, arguments.tokens))))


if __name__ == "__main__":
    main()
