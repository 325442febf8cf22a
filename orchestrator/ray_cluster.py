"""Starting Ray, or joining it: private, authenticated, silent, and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orchestrator.errors import RayUnreachableError

#: Ray's own store carries our reports and nothing else; left to itself it reserves 30 % of the memory.
_OBJECT_STORE_BYTES = 100 * 2**20


@contextmanager
def ray_cluster(
    *, workers: int, niceness: int, address: str | None, state_dir: Path, join_timeout_s: float = 60.0
) -> Iterator[None]:
    """Connects this process to a Ray of its own, or to the one at `address`, until the end of the block.

    Args:
        workers: processes the private Ray has room for.
        niceness: of those processes; an existing Ray has its own.
        address: HOST:PORT of a running head (its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH); None starts one.
        join_timeout_s: how long to wait for somebody to listen at `address`.
        state_dir: where the token of the private Ray is kept, readable by its owner alone.

    Raises:
        RayUnreachableError: nobody listens at `address`.
    """
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SCHEDULER_EVENTS="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    )
    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(_token_file(state_dir)))
    if address is not None:
        _wait_for_port(address, timeout_s=join_timeout_s)
    temp_dir = None if address is not None else _temp_dir()
    import ray  # reads the environment above

    if temp_dir is None:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    else:
        ray.init(
            address="local",  # never the cluster of somebody else that happens to run here
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="WARNING",
            _temp_dir=str(temp_dir),
            _system_config={"worker_niceness": niceness},
        )
    try:
        yield
    finally:
        ray.shutdown()
        if temp_dir is not None:
            shutil.rmtree(temp_dir, ignore_errors=True)


def _token_file(state_dir: Path) -> Path:
    path = state_dir / "ray-token"
    state_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path


def _temp_dir() -> Path:
    """A folder named after this process. Ray puts sockets there, and their paths may have 107 bytes: it must be short.

    Folders that killed processes left behind are removed first.
    """
    for left in Path("/tmp").glob("longlaw-ray-*"):
        pid = left.name.removeprefix("longlaw-ray-")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    path = Path(f"/tmp/longlaw-ray-{os.getpid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _wait_for_port(address: str, *, timeout_s: float) -> None:
    """Returns when somebody listens at HOST:PORT; Ray itself would wait for minutes without a word."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RayUnreachableError(f"the address of Ray must be HOST:PORT, not {address!r}")
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RayUnreachableError(f"no Ray answers at {address}: {error}") from None
            time.sleep(0.5)
