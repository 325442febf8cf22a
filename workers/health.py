"""How training goes: signs of life, a bounded series of points, and the rule that says when it has diverged."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import torch

from workers.errors import DivergedError
from workers.results import HealthPoint, TrainProgress
from workers.spec import Segment

#: Training has diverged when the mean loss of so many steps lies so far (nats) above the lowest such mean before.
WINDOW_STEPS = 64
EXCESS_NATS = 1.0

#: Points between two checkpoints at most.
POINTS = 64
PROGRESS_EVERY_S = 1.0

#: Dense bf16 operations a second, from NVIDIA's data sheets, by what a device's name contains; the first that fits.
PEAK_FLOPS = (
    ("A100", 312e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
)


class LossWatch:
    """Raises once training is beyond repair; knows the checkpoint to go back to.

    It begins anew with every run: a resumed one compares with the losses it has seen itself.
    """

    def __init__(self, saved_step: int | None) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._saved = self._saved_at_best = saved_step
        self._best = math.inf

    def saved(self, step: int) -> None:
        """Says that a checkpoint was taken after `step` updates."""
        self._saved = step

    def check(self, step: int, loss: float, gradient_norm: float) -> None:
        """Judges update `step`, 1-based, before it is made.

        Raises:
            DivergedError: if the loss or the gradient's norm is not finite, or the mean loss has risen too far.
        """
        if not math.isfinite(loss):
            raise DivergedError(step=step, loss=loss, good_step=self._saved)
        if not math.isfinite(gradient_norm):
            raise DivergedError(step=step, loss=loss, gradient_norm=gradient_norm, good_step=self._saved)
        self._losses.append(loss)
        if len(self._losses) < WINDOW_STEPS:
            return
        mean = math.fsum(self._losses) / WINDOW_STEPS
        if mean < self._best:
            self._best, self._saved_at_best = mean, self._saved
        elif mean > self._best + EXCESS_NATS:
            raise DivergedError(step=step, loss=mean, best_mean=self._best, good_step=self._saved_at_best)


class HealthSeries:
    """Collects points between checkpoints, evenly spaced, the last one at the checkpoint itself.

    Args:
        step: Updates done; the clock starts here.
    """

    def __init__(self, segment: Segment, *, peak_flops: float | None, step: int) -> None:
        self._tokens_per_step = segment.stage.tokens_per_step
        self._flops_per_token = segment.shape.train_flops_per_token(segment.stage.seq_len)
        self._peak_flops = peak_flops
        self._points: list[HealthPoint] = []
        self._since_step, self._since = step, time.monotonic()
        self._until = self._stride = 0

    def expect(self, step: int, until: int) -> None:
        """Says that `step` updates are done and the next checkpoint comes after `until`."""
        self._until, self._stride = until, -(-(until - step) // POINTS)

    def record(self, step: int, *, loss: float, gradient_norm: float, learning_rate: float) -> None:
        """Keeps a point, where one is due after `step` updates."""
        if (self._until - step) % self._stride:
            return
        now = time.monotonic()
        tokens_per_s = (step - self._since_step) * self._tokens_per_step / max(now - self._since, 1e-9)
        self._since_step, self._since = step, now
        mfu = None if self._peak_flops is None else tokens_per_s * self._flops_per_token / self._peak_flops
        self._points.append(
            HealthPoint(
                step=step,
                loss=loss,
                gradient_norm=gradient_norm,
                learning_rate=learning_rate,
                tokens_per_s=tokens_per_s,
                mfu=mfu,
            )
        )

    def take(self) -> tuple[HealthPoint, ...]:
        """The points since the last time, which are then forgotten."""
        points, self._points = tuple(self._points), []
        return points


class ProgressReporter:
    """Passes a sign of life on, at most once in `PROGRESS_EVERY_S`."""

    def __init__(self, segment: Segment, step: int, on_progress: Callable[[TrainProgress], None] | None) -> None:
        self._segment = segment
        self._on_progress = on_progress
        self._since_step, self._since = step, time.monotonic()

    def report(self, step: int, *, loss: float, gradient_norm: float, learning_rate: float) -> None:
        now = time.monotonic()
        if self._on_progress is None or now - self._since < PROGRESS_EVERY_S:
            return
        tokens = (step - self._since_step) * self._segment.stage.tokens_per_step
        self._on_progress(
            TrainProgress(
                step=step,
                stage_tokens=self._segment.stage_tokens(step),
                loss=loss,
                learning_rate=learning_rate,
                tokens_per_s=tokens / max(now - self._since, 1e-9),
                gradient_norm=gradient_norm,
            )
        )
        self._since_step, self._since = step, now


def peak_flops(device: torch.device, processes: int) -> float | None:
    """Operations a second of `processes` such devices; None where no figure is stated for them."""
    peak = stated_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if peak is None else processes * peak


def stated_peak_flops(name: str) -> float | None:
    """Operations a second of one device, by the name that CUDA gives it."""
    return next((peak for part, peak in PEAK_FLOPS if part in name), None)
