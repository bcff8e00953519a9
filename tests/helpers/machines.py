"""Processes that stand for the machines of a run, on this host: they meet over the loopback device.

They are started once for many tests, since each imports torch and Lightning, and run one function after another.
"""

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.helpers.equivalence import TrainResult

__all__ = ["Failure", "Machine", "Machines", "of_machine", "portable"]

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Machine:
    """What a function that runs on a machine is told."""

    rank: int
    count: int

    def part(self, batches: list[Any]) -> list[Any]:
        """This machine's part of joint batches."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.chunk(self.count)[self.rank], batches)


@dataclass(frozen=True)
class Failure:
    """What a function raised: the names of the error's class and its bases, and the text."""

    names: tuple[str, ...]
    message: str


def portable(result: TrainResult) -> dict[str, Any]:
    """What of a fit can be sent to another process."""
    return {
        "state": result.state,
        "optimizer": result.optimizer,
        "losses": result.losses,
        "metrics": result.metrics,
        "learning_rates": result.learning_rates,
        "global_step": result.trainer.global_step,
    }


class Machines:
    """A few processes, started when they are first needed, and again when one has died."""

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lightning.pytorch", "torchmetrics"])
        self._count = count
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, count: int = 2, elastic: bool = False) -> list[Any]:
        """Run ``function(machine, *args)`` on ``count`` machines; what each returned, or how it failed.

        Args:
            function: found by its name in its module.
            *args: pickled.
            count: number of machines.
            elastic: whether the environment is that of torchrun; otherwise the variables that Lightning reads.
        """
        self._start()
        port = _free_port()
        for rank in range(count):
            self._ends[rank].send((function, Machine(rank, count), args, elastic, port))
        return [self._answer(rank) for rank in range(count)]

    def _start(self) -> None:
        for rank in range(self._count):
            if rank == len(self._processes) or not self._processes[rank].is_alive():
                here, there = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(there,), daemon=True)
                process.start()
                there.close()
                self._processes[rank : rank + 1], self._ends[rank : rank + 1] = [process], [here]

    def _answer(self, rank: int) -> Any:
        try:
            if not self._ends[rank].poll(_TIMEOUT_S):
                raise AssertionError(f"Machine {rank} gave no answer.")
            data = self._ends[rank].recv_bytes()
        except (EOFError, ConnectionError):
            self._processes[rank].join()
            return None  # It was told to die.
        return torch.load(io.BytesIO(data), weights_only=False)

    def close(self) -> None:
        """End the processes."""
        for process, end in zip(self._processes, self._ends, strict=True):
            end.close()
            process.kill()
            process.join()
        self._processes, self._ends = [], []


def of_machine(rank: int, results: list[Any]) -> Any:
    """What a machine returned; fails if it failed."""
    result = results[rank]
    assert not isinstance(result, Failure), f"machine {rank}: {result.names[0]}: {result.message}"
    return result


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(end: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, machine, args, elastic, port = end.recv()
        except EOFError:
            return
        try:
            with _environment(machine, port, elastic=elastic):
                result = function(machine, *args)
        except BaseException as error:
            names = tuple(base.__name__ for base in type(error).__mro__)
            result = Failure(names, f"{error}\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        data = io.BytesIO()
        torch.save(result, data)
        end.send_bytes(data.getvalue())


@contextmanager
def _environment(machine: Machine, port: int, *, elastic: bool) -> Iterator[None]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if elastic:
        variables |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "GROUP_RANK": str(machine.rank)}
        variables |= {"RANK": str(machine.rank), "WORLD_SIZE": str(machine.count), "LOCAL_WORLD_SIZE": "1"}
    else:
        variables |= {"NODE_RANK": str(machine.rank)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
