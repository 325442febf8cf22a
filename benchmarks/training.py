"""Training speed and memory beside Hugging Face's own.

``python -m benchmarks.training [--json] [--no-memory]`` builds a small corpus in a temporary folder and prints. Speed:
the quick-start's models and one of width 512, the same updates by Hugging Face's Trainer. Tokens per CPU second on one
thread: machines are shared, and the quick-start gives each training process one thread. Both trainers get the same
model, the same sequences, the same optimizer and clipping, and take turns. The lower quartile of all updates counts,
without the first ones of each run: other work on the machine only ever adds time. `hf_trainer_ratio` is our speed over
the Trainer's; the one above the rows is the lowest of the quick-start's models. Memory: `benchmarks.training_memory`.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import accelerate
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks import training_memory
from workers import health
from workers.corpus import Corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import TorchSource
from workers.mixture import open_training_data
from workers.model import open_model
from workers.spec import AdamW, DataMix, ModelShape, Segment, SegmentRun, ShortStage
from workers.train import train

LENGTHS = (128, 1024)
TOKENS_PER_STEP = 1024
WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How wide a model is and how long it is timed."""

    width: int
    rounds: int
    steps: int


MICRO_SIZES = (
    Size(width=32, rounds=5, steps=15),
    Size(width=64, rounds=5, steps=15),
    Size(width=96, rounds=5, steps=15),
)
LARGE_SIZE = Size(width=512, rounds=3, steps=7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Lower quartiles over the updates of all rounds."""

    model: str
    n_params: int
    seq_len: int
    ms_per_step: float
    tokens_per_cpu_s: float
    hf_trainer_tokens_per_cpu_s: float
    hf_trainer_ratio: float


class _Sequences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, store: Path, segment: Segment, steps: int) -> None:
        stage = segment.stage
        data = open_training_data(store, stage.data, seq_len=stage.seq_len)
        self._rows = torch.from_numpy(
            data.batch(seed=segment.seed, first=0, count=steps * stage.batch_sequences).inputs
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Trainer shifts labels itself: the window's last target has no place here.
        row = self._rows[index]
        return {"input_ids": row, "labels": row}


def measure(store: Path, corpus: Corpus, size: Size, seq_len: int) -> Timing:
    """Times both trainers on one model and one sequence length."""
    segment = _segment(corpus, size.width, seq_len)
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(size.rounds):
        ours += _our_updates(store, segment, number, size.steps)
        theirs += _hugging_face_updates(store, segment, size.steps)
    ours_s, theirs_s = (statistics.quantiles(updates, n=4)[0] for updates in (ours, theirs))
    return Timing(
        model=f"d{size.width}",
        n_params=segment.shape.n_params,
        seq_len=seq_len,
        ms_per_step=1e3 * ours_s,
        tokens_per_cpu_s=TOKENS_PER_STEP / ours_s,
        hf_trainer_tokens_per_cpu_s=TOKENS_PER_STEP / theirs_s,
        hf_trainer_ratio=theirs_s / ours_s,
    )


def _segment(corpus: Corpus, width: int, seq_len: int) -> Segment:
    shape = ModelShape(
        layers=2,
        width=width,
        heads=width // 32,
        kv_heads=width // 32,
        ffn_width=3 * width,
        vocab_size=512,
        qk_conv_kernel=3,
        init_std=0.05,
    )
    stage = ShortStage(
        seq_len=seq_len,
        batch_sequences=TOKENS_PER_STEP // seq_len,
        rope_base=1e4,
        peak_rate=0.001,
        warmup_steps=0,
        final_rate_ratio=0.25,
        data=DataMix(corpus=corpus.hash, split="short", copied_spans=0.5),
        optimizer=AdamW(beta2=0.98),
    )
    return Segment(kind="short_trunk", parent=None, shape=shape, stage=stage, seed=0)


def _our_updates(store: Path, segment: Segment, number: int, steps: int) -> list[float]:
    root = store / f"round-{number}-{segment.id}"
    root.mkdir()
    (root / "corpora").symlink_to(store / "corpora")
    ends: list[float] = []
    run = SegmentRun(segment=segment, start=None, save_steps=(steps,))
    for _ in train(run, store=root, on_progress=lambda _: ends.append(time.process_time())):
        pass
    return [end - begin for begin, end in pairwise(ends)][WARM_UP:]


class _Ends(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.process_time())


def _hugging_face_updates(store: Path, segment: Segment, steps: int) -> list[float]:
    stage, optimizer = segment.stage, AdamW(beta2=0.98)
    arguments = TrainingArguments(
        output_dir=str(store / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=stage.batch_sequences,
        learning_rate=0.001,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )
    model = open_model(
        segment.shape, rope_base=stage.rope_base, max_positions=stage.seq_len, store=store, seed=segment.seed
    )
    callback = _Ends()
    sequences = _Sequences(store, segment, steps)
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [end - begin for begin, end in pairwise(callback.ends)][WARM_UP:]


def main() -> None:
    """Print the measurements as tables, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, which needs 8 GB")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    health.PROGRESS_EVERY_S = 0.0  # every update is timed
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        manifest = build_corpus(TorchSource(), store=store, name="benchmark", max_bytes=500_000)
        corpus = open_corpus(store, manifest.hash)
        micro = [measure(store, corpus, size, length) for size in MICRO_SIZES for length in LENGTHS]
        large = [measure(store, corpus, LARGE_SIZE, length) for length in LENGTHS]
    peaks = [] if arguments.no_memory else training_memory.measure_all()
    if arguments.json:
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        }
        found = {
            "versions": versions,
            "hf_trainer_ratio": min(timing.hf_trainer_ratio for timing in micro),
            "hf_trainer_ratio_d512": min(timing.hf_trainer_ratio for timing in large),
            "timings": [asdict(timing) for timing in (*micro, *large)],
            "memory": [asdict(peak) for peak in peaks],
        }
        print(json.dumps(found, indent=2))
        return
    shown = Table("model", "N", "length", "ms a step", "tokens/CPU-s", "Trainer's", "ratio")
    for timing in (*micro, *large):
        shown.add_row(
            timing.model,
            f"{timing.n_params:,}",
            f"{timing.seq_len:,}",
            f"{timing.ms_per_step:.1f}",
            f"{timing.tokens_per_cpu_s:,.0f}",
            f"{timing.hf_trainer_tokens_per_cpu_s:,.0f}",
            f"{timing.hf_trainer_ratio:.2f}",
        )
    Console().print(shown)
    memory = Table("step", "tokens", "vocabulary", "before, MB", "peak, MB")
    for peak in peaks:
        memory.add_row(
            peak.step,
            f"{peak.tokens:,}",
            f"{peak.vocab_size:,}",
            f"{peak.before_bytes / 1e6:,.0f}",
            f"{peak.peak_bytes / 1e6:,.0f}",
        )
    Console().print(memory)


if __name__ == "__main__":
    main()
