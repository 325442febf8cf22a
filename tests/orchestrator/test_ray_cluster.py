"""Ray's surroundings: its token, its folder, an address where nobody listens."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from orchestrator.errors import RayUnreachableError
from orchestrator.executor import RayExecutor
from orchestrator.ray_cluster import ray_cluster


def _join(address: str, state_dir: Path) -> None:
    with ray_cluster(workers=1, niceness=0, address=address, state_dir=state_dir, join_timeout_s=0.0):
        pass


def test_address_where_nobody_listens_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        port = taken.getsockname()[1]
        with pytest.raises(RayUnreachableError, match=f"no Ray answers at 127.0.0.1:{port}"):
            _join(f"127.0.0.1:{port}", tmp_path)


@pytest.mark.parametrize("address", ["localhost", "ray://head:port", "auto"])
def test_unreadable_address_is_named(address: str, tmp_path: Path) -> None:
    with pytest.raises(RayUnreachableError, match="HOST:PORT"):
        _join(address, tmp_path)


def test_private_ray_is_authenticated_and_silent(ray_workers: RayExecutor) -> None:
    """The token is readable by its owner alone, and the folder of sockets and logs is named after this process."""
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert Path(f"/tmp/longlaw-ray-{os.getpid()}").is_dir()
