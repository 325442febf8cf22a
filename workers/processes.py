"""Processes that train one segment together: who they are, what each takes, and what they tell one another.

Each process has one device. gloo connects CPUs, NCCL GPUs; replicas are torch's DDP, shards its FSDP2 (`fully_shard`).
Nothing here is kept between two trainings but torch's process group, which `joined` makes and ends.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from workers.errors import ProcessLostError
from workers.spec import Sharding

T = TypeVar("T")

#: How long a process waits for the others while they train. A checkpoint of the largest model is written within it.
PATIENCE = timedelta(minutes=30)
#: How long it waits until all have come. They have nothing to do before.
MEETING_PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The processes that train together, as one of them sees them; a process alone is a group of one."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True in the one process that writes checkpoints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of every process's `values`, in all of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def from_leader(self, work: Callable[[], T]) -> T:
        """What `work` returns where it leads, in all processes; what it raises is raised in all of them."""
        if self.size == 1:
            return work()
        outcome: list[T | Exception | None] = [None]
        if self.leads:
            try:
                outcome = [work()]
            except Exception as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]  # type: ignore[return-value]


def current() -> Group:
    """The group that `joined` made, or this process alone."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not dist.is_initialized():
        return Group(rank=0, size=1, device=device)
    return Group(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def open_meeting_place() -> TCPStore:
    """Listens at a free port of this machine, `port`, from now on: no one else can take it before the others come."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=MEETING_PATIENCE)


@contextmanager
def joined(*, rank: int, processes: int, address: str, port: int, place: TCPStore | None = None) -> Iterator[None]:
    """Meets the other processes at `address`:`port`, and parts from them at the end.

    Every process must see one GPU as its first (Ray does that), or none.

    Args:
        place: In the process that listens there, what `open_meeting_place` made; None in the others.

    Raises:
        ProcessLostError: if they cannot be reached, do not come, or one of them is gone before all have parted.
    """
    try:
        place = place or TCPStore(address, port, wait_for_workers=False, timeout=MEETING_PATIENCE)
        _wait_for_all(place, rank, processes)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=place,
            rank=rank,
            world_size=processes,
            timeout=PATIENCE,
        )
        yield
    except BaseException as error:
        _let_go(error)
        if isinstance(error, RuntimeError) and _is_about_others(error):
            what = str(error).strip().partition("\n")[0]
            raise ProcessLostError(f"one of {processes} processes is gone or unreachable: {what}") from error
        raise
    finally:
        # DDP's reducer holds the group: were it the last to do so, gloo's threads would be joined under the GIL and
        # could wait for ever.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_all(place: TCPStore, rank: int, processes: int) -> None:
    place.set(f"here/{rank}", "")
    try:
        place.wait([f"here/{other}" for other in range(processes)])
    except dist.DistStoreError:
        missing = [str(other) for other in range(processes) if not place.check([f"here/{other}"])]
        raise ProcessLostError(
            f"process {', '.join(missing)} of {processes} did not come within {MEETING_PATIENCE.total_seconds():.0f} s"
        ) from None


def _let_go(error: BaseException) -> None:
    """Frees what the frames of a failure hold, DDP's reducer among it. Its traceback still says where it was."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _is_about_others(error: RuntimeError) -> bool:
    """Whether it tells of the other processes. gloo has no error class of its own, but names its source file."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def spread(loss_of: nn.Module, model: PreTrainedModel, group: Group, sharding: Sharding) -> nn.Module:
    """`loss_of`, which holds `model`, on the group's devices: whole in each, or every layer shared out.

    Gradients come out as the mean over processes. With "shard" the model's parameters are other objects afterwards.
    """
    if group.size > 1 and sharding == "shard":
        mesh = init_device_mesh(group.device.type, (group.size,))
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(loss_of, mesh=mesh)
        return loss_of
    loss_of.to(group.device)
    if group.size == 1:
        return loss_of
    return DistributedDataParallel(loss_of, broadcast_buffers=False, gradient_as_bucket_view=True)


def keeping_gradients(loss_of: nn.Module, *, more: bool) -> AbstractContextManager[None]:
    """Around forward and backward of a micro-batch: replicas exchange gradients with the last one alone.

    Shards always do: whole gradients would not fit where they are needed.
    """
    if more and isinstance(loss_of, DistributedDataParallel):
        return loss_of.no_sync()
    return nullcontext()
