"""The machines of a run: one process on each, joined by `torch.distributed`.

With one machine nothing here does anything: no process group is made, and collectives return what they are given.
"""

import os
import traceback
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lightning_roundpipe._version import __version__
from lightning_roundpipe.exceptions import MachineLostError, MachineMismatchError, UnsupportedUseError
from lightning_roundpipe.runtime.collectives import is_lost_connection, naming_lost_machines
from lightning_roundpipe.runtime.lookup import current_resolver

__all__ = ["Machines", "settings_of"]

T = TypeVar("T")

_SAME_EVERYWHERE = (
    "precision",
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)
"""Attributes of the Trainer that must not differ between machines."""

_SHOWN = 5
_HASH_THREADS = 8
_FEW_ELEMENTS = 2**20


_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def _check_launch(environment: ClusterEnvironment, num_nodes: int, launched: int) -> None:
    """See that as many processes were started as there are machines, and that they can find each other.

    Args:
        environment: how Lightning finds the other processes.
        num_nodes: number of machines that the Trainer was told.
        launched: number of processes that the environment variables tell of.

    Raises:
        MisconfigurationException: they were not, or cannot.
    """
    processes = max(launched, environment.world_size())
    missing = [name for name in _MEETING_PLACE if name not in os.environ]
    if num_nodes > 1 and missing and isinstance(environment, LightningEnvironment):
        raise MisconfigurationException(
            f"`num_nodes={num_nodes}` takes a launcher that starts one process on each machine (`torchrun --nnodes"
            f" {num_nodes} --nproc-per-node 1`, `srun --ntasks-per-node=1`), or these environment variables, which are"
            f" not set: {', '.join(missing)}."
        )
    if processes != num_nodes:
        source = "`WORLD_SIZE` in the environment" if launched > 1 else type(environment).__name__
        raise MisconfigurationException(
            f"RoundPipeStrategy drives all GPUs of a machine from one process, but {source} says that there are"
            f" {processes} processes, and the Trainer has `num_nodes={num_nodes}`. Start one process on each machine"
            f" (`torchrun --nnodes M --nproc-per-node 1`, `srun --ntasks-per-node=1`) with"
            " `Trainer(num_nodes=M, devices=N)`, where N is the number of GPUs of a machine."
        )


def settings_of(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What of a fit must be the same on all machines, by name, beside the strategy's arguments."""
    settings: dict[str, Any] = {f"`{name}`": getattr(trainer, name) for name in _SAME_EVERYWHERE}
    settings["`automatic_optimization`"] = module.automatic_optimization
    settings |= {"version of this package": __version__, "version of torch": torch.__version__.partition("+")[0]}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(trainer.optimizers):
        settings[f"optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups):
            members = ", ".join(names.get(id(parameter), "?") for parameter in group["params"])
            numbers = {name: value for name, value in group.items() if name != "params"}
            settings[f"parameter group {place} of optimizer {number}"] = (
                f"{numbers} for {len(group['params'])} parameters ({zlib.crc32(members.encode()):08x} by name)"
            )
    return settings


class Machines:
    """Joins the processes of a run, and does what Lightning asks them to do together.

    Args:
        backend: of `torch.distributed`; it must work on tensors in host memory.
        timeout: how long a machine waits for the others before it gives up.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self._backend = backend
        self._timeout = timeout
        self._environment: ClusterEnvironment | None = None
        self._owns_world = False
        self._joined = False
        self.gradient_group: dist.ProcessGroup | None = None

    # ------------------------------------------------------------------ joining and leaving

    @property
    def rank(self) -> int:
        """Number of this machine."""
        return self._environment.global_rank() if self._environment is not None else 0

    @property
    def count(self) -> int:
        """Number of machines."""
        return self._environment.world_size() if self._environment is not None else 1

    @property
    def are_joined(self) -> bool:
        """Whether there are several machines that can reach each other."""
        return self._joined

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in this process or another, has joined nobody.
        return {**vars(self), "gradient_group": None, "_joined": False, "_owns_world": False}

    def launched_by(self, environment: ClusterEnvironment, num_nodes: int) -> None:
        """Take the number of this machine from what started the process.

        Raises:
            MisconfigurationException: there are more or fewer processes than machines.
        """
        # Those that know better ignore it.
        environment.set_world_size(num_nodes)
        environment.set_global_rank(environment.node_rank())
        _check_launch(environment, num_nodes, launched=int(os.environ.get("WORLD_SIZE", "1")))
        self._environment = environment
        if self.count > 1:
            rank_zero_only.rank = self.rank  # type: ignore[attr-defined]

    def join(self) -> None:
        """Wait for the other machines.

        Raises:
            MisconfigurationException: the backend cannot send tensors in host memory.
            MachineLostError: not all of them came.
        """
        if self.count == 1 or self._joined:
            return
        assert self._environment is not None
        if not dist.is_initialized():
            with naming_lost_machines(f"before all {self.count} had joined"):
                self._make_world(self._environment)
            self._owns_world = True
            rank_zero_info(f"All {self.count} machines have joined.")
        if (size := dist.get_world_size()) != self.count:
            raise MisconfigurationException(
                f"The process group of `torch.distributed` has {size} processes, but there are {self.count} machines."
            )
        if "cpu:" not in dist.get_backend_config():
            raise MisconfigurationException(
                f"Gradients are in host memory, but the backend {dist.get_backend()!r} sends only that of GPUs. Use"
                " `RoundPipeStrategy(process_group_backend='gloo')`, or 'cpu:gloo,cuda:nccl'."
            )
        self._joined = True

    def _make_world(self, environment: ClusterEnvironment) -> None:
        place = f"tcp://{environment.main_address}:{environment.main_port}"
        store, _, _ = next(rendezvous(place, self.rank, self.count, timeout=self._timeout))
        store.set_timeout(self._timeout)
        # A launcher's store outlives an error, and remembers addresses of connections that are closed.
        times = store.add(f"roundpipe/{self.rank}", 1)
        store = PrefixStore(f"roundpipe/{times}", store)
        dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.count, timeout=self._timeout
        )

    def open_gradient_group(self) -> dist.ProcessGroup | None:
        """A process group for gradients alone; None if there is one machine."""
        if self._joined and self.gradient_group is None:
            with naming_lost_machines("while a process group was made"):
                self.gradient_group = dist.new_group(timeout=self._timeout)
        return self.gradient_group

    def leave(self) -> None:
        """End what belongs to one fit; the machines stay joined for the next one."""
        if self.gradient_group is not None:
            with suppress(RuntimeError):  # The others may have gone.
                dist.barrier(self.gradient_group)
            dist.destroy_process_group(self.gradient_group)
            self.gradient_group = None

    def abandon(self, error: BaseException) -> None:
        """Close the connections after an error, so that the others end at once; this machine is alone from now on."""
        if self._joined:
            self._joined = False
            _release_groups(error)
            if self.gradient_group is not None:
                dist.destroy_process_group(self.gradient_group)
                self.gradient_group = None
            if self._owns_world:
                dist.destroy_process_group()
                self._owns_world = False

    # ------------------------------------------------------------------ what Lightning asks for

    def reduce(self, tensor: T, group: Any, reduce_op: Any) -> T:
        """Reduce a tensor over the machines; anything else is returned as it is."""
        if not self._joined or not isinstance(tensor, Tensor):
            return tensor
        self._refuse_inside_steps("reduce")
        with naming_lost_machines("while values were reduced"):
            # Through the host: not every backend takes tensors of GPUs.
            reduced: Tensor = _sync_ddp_if_available(tensor.detach().cpu().clone(), group, reduce_op)
        return reduced.to(tensor.device)  # type: ignore[return-value]

    def all_gather(self, tensor: Tensor, group: Any, *, sync_grads: bool) -> Tensor:
        """Gather a tensor from all machines, along a new first dimension; with one machine, the tensor itself."""
        if not self._joined:
            return tensor
        self._refuse_inside_steps("all_gather")
        with naming_lost_machines("while values were gathered"):
            return _all_gather_ddp_if_available(tensor.cpu(), group, sync_grads).to(tensor.device)

    def broadcast(self, obj: T, source: int = 0) -> T:
        """What machine ``source`` gave."""
        if not self._joined:
            return obj
        self._refuse_inside_steps("broadcast")
        objects = [obj if self.rank == source else None]
        with naming_lost_machines("while an object was broadcast"):
            dist.broadcast_object_list(objects, source)
        return objects[0]  # type: ignore[return-value]

    def barrier(self, name: str | None) -> None:
        """Wait until all machines have come here."""
        if self._joined:
            self._refuse_inside_steps("barrier")
            with naming_lost_machines(f"at the barrier {name!r}" if name else "at a barrier"):
                dist.barrier()

    @staticmethod
    def _refuse_inside_steps(name: str) -> None:
        resolver: Any = current_resolver()
        if resolver is not None and not resolver.is_alone:
            raise UnsupportedUseError(
                f"`{name}` over several machines was called inside a step, which runs once for each micro-batch: in"
                " which order these come to it differs from machine to machine. Call it between steps, use"
                " `self.log(..., sync_dist=True)`, or `RoundPipeStrategy(num_microbatches=1)`."
            )

    # ------------------------------------------------------------------ what must be the same everywhere

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """See that all machines were given the same settings.

        Args:
            facts: what must be the same, by name; compared as text.

        Raises:
            MachineMismatchError: something is not.
        """
        if not self._joined:
            return
        everywhere: list[Any] = [None] * self.count
        with naming_lost_machines("while settings were compared"):
            dist.all_gather_object(everywhere, {name: str(value) for name, value in facts.items()})
        names = list(dict.fromkeys(name for facts in everywhere for name in facts))
        found = {name: [facts.get(name, "absent") for facts in everywhere] for name in names}
        differing = [name for name, values in found.items() if len(set(values)) > 1]
        if differing:
            lines = [
                f"{name}: " + ", ".join(f"{value} on machine {rank}" for rank, value in enumerate(found[name]))
                for name in differing[:_SHOWN]
            ]
            more = [f"and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
            raise MachineMismatchError(
                "All machines must train the same model with the same settings, but these differ: "
                + "; ".join(lines + more)
                + ". Start the same script with the same arguments and the same versions everywhere."
            )

    def spread(self, tensors: Iterable[Tensor]) -> int:
        """Give all machines the values that machine 0 has; what is the same already is not sent.

        Args:
            tensors: in host memory, the same shapes and dtypes everywhere.

        Returns:
            The number of tensors that were not the same on all machines.
        """
        if not self._joined:
            return 0
        tensors = [tensor.detach() for tensor in tensors]
        own = torch.tensor(_checksums(tensors), dtype=torch.int64)
        with naming_lost_machines("while weights and buffers were compared"):
            least, greatest = own.clone(), own
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(greatest, dist.ReduceOp.MAX)
            differing = (least != greatest).nonzero().flatten().tolist()
            for index in differing:
                values = tensors[index].clone(memory_format=torch.contiguous_format)
                dist.broadcast(_bytes(values), 0)
                tensors[index].copy_(values)  # An ordinary write, which workers notice.
        return len(differing)


def _release_groups(error: BaseException) -> None:
    """Let the frames of failed collectives go: what they hold keeps connections open as long as the error is known."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MachineLostError) or is_lost_connection(chain):
            traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    if sum(tensor.numel() for tensor in tensors) < _FEW_ELEMENTS:
        return list(map(_checksum, tensors))
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(_checksum, tensors))


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(_bytes(tensor.contiguous()).numpy().data)
