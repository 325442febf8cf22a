"""What the scheduler reads from the environment, beside `database.settings`."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _usable_cores() -> int:
    """Cores this process may run on: fewer than the machine's inside a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SchedulerSettings(BaseSettings):
    """The environment of a scheduler. Build it in `main` and hand it down.

    Attributes:
        workers: `LONGLAW_WORKERS`, training processes; one for each core of this machine by default.
        worker_gpus: `LONGLAW_WORKER_GPUS`, GPUs that each of them gets for itself.
        worker_niceness: `LONGLAW_WORKER_NICENESS`, so that Postgres, the API and the desktop go first.
        ray_address: `LONGLAW_RAY_ADDRESS`, HOST:PORT of a running Ray head; a private Ray on this machine by default.
        recovery_steps: `LONGLAW_RECOVERY_STEPS`, steps between recovery checkpoints: what a fault can cost at most.
        keep_checkpoints: `LONGLAW_KEEP_CHECKPOINTS`, `all`, or only those still `needed` (`database.retention`).
        user_retries: `LONGLAW_USER_RETRIES`, tries after an exception of training or measuring itself.
        infrastructure_retries: `LONGLAW_INFRASTRUCTURE_RETRIES`, tries after lost workers and full disks, in a row.
        backoff_s: `LONGLAW_BACKOFF_S`, wait before the first retry; it doubles with each further one.
        lease_s: `LONGLAW_LEASE_S`, after which the attempts of a scheduler that is not heard of go to another one.
        stop_grace_s: `LONGLAW_STOP_GRACE_S`, how long work may take to reach a checkpoint when it is asked to stop.
        silence_limit_s: `LONGLAW_SILENCE_LIMIT_S`, after which a worker that does not answer is given up.
        fit_debounce_s: `LONGLAW_FIT_DEBOUNCE_S`, how long a series must be quiet before its law is fitted again.
        poll_s: how long one turn waits for news, at most.
        tend_s: time between heartbeats, lease renewals and looks at what became possible.
    """

    model_config = SettingsConfigDict(env_prefix="LONGLAW_", env_ignore_empty=True, frozen=True)

    workers: int = Field(default_factory=_usable_cores, ge=1)
    worker_gpus: float = Field(default=0.0, ge=0)
    worker_niceness: int = Field(default=10, ge=0, le=19)
    ray_address: str | None = None
    recovery_steps: int | None = Field(default=500, ge=1)
    keep_checkpoints: Literal["all", "needed"] = "all"
    user_retries: int = Field(default=1, ge=0)
    infrastructure_retries: int = Field(default=5, ge=0)
    backoff_s: float = Field(default=1.0, gt=0)
    lease_s: float = Field(default=60.0, gt=0)
    stop_grace_s: float = Field(default=10.0, ge=0)
    silence_limit_s: float = Field(default=60.0, gt=0)
    fit_debounce_s: float = Field(default=3.0, ge=0)
    poll_s: float = Field(default=0.25, gt=0)
    tend_s: float = Field(default=0.5, ge=0)
