"""Optimizer state divided over machines: each steps its share of the parameters and tells the others the result.

The optimizer of each machine knows all parameters, but has state only for those of its share. Source of the idea: ZeRO,
stage 1 (arXiv 1910.02054).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_roundpipe.runtime.collectives import naming_lost_machines

__all__ = ["UpdateShares", "parameters_of"]

_BUCKET_BYTES = 2**25


class UpdateShares:
    """Which machine updates which parameter.

    Args:
        rank: number of this machine.
        num_machines: how many there are.

    Threading: for one thread, while no other uses the process groups that are given.
    """

    def __init__(self, rank: int, num_machines: int) -> None:
        self._rank = rank
        self._elements = [0] * num_machines
        # The parameter is kept so that its `id` is not given to another one.
        self._owners: dict[int, tuple[Tensor, int]] = {}

    def assign(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters that have no owner yet, the same on all machines, to those with the least to do."""
        new = [parameter for parameter in parameters if id(parameter) not in self._owners]
        for parameter in sorted(new, key=Tensor.numel, reverse=True):
            owner = self._elements.index(min(self._elements))
            self._elements[owner] += parameter.numel()
            self._owners[id(parameter)] = parameter, owner

    def owns(self, parameter: Tensor) -> bool:
        """Whether this machine updates ``parameter``, which was assigned."""
        return self._owners[id(parameter)][1] == self._rank

    @torch.no_grad()
    def exchange(self, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Give all machines what the owners of ``parameters``, the same on all machines, have made of them.

        Raises:
            MachineLostError: another machine is gone or does not answer.
        """
        shares: list[list[Tensor]] = [[] for _ in self._elements]
        for parameter in parameters:
            shares[self._owners[id(parameter)][1]].append(parameter)
        # One bucket of each owner at a time, so that all of them send at once.
        for buckets in zip_longest(*map(_buckets, shares)):
            sent = []
            with naming_lost_machines("while updated weights were exchanged"):
                for owner, bucket in enumerate(buckets):
                    if bucket is not None:
                        flat = self._flat(bucket, owner)
                        sent.append((bucket, flat, owner, dist.broadcast(flat, owner, group, async_op=True)))
                for bucket, flat, owner, work in sent:
                    work.wait()
                    if owner != self._rank:
                        for parameter, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                            if parameter.data_ptr() != values.data_ptr():
                                parameter.copy_(values.view(parameter.shape))

    def _flat(self, bucket: Sequence[Tensor], owner: int) -> Tensor:
        """Where the values of a bucket are sent from, or arrive."""
        if len(bucket) == 1 and bucket[0].is_contiguous():
            return bucket[0].detach().view(-1)
        if owner == self._rank:
            return torch.cat([parameter.detach().reshape(-1) for parameter in bucket])
        return torch.empty(sum(parameter.numel() for parameter in bucket), dtype=bucket[0].dtype)

    def own_part(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this machine needs of a whole state of ``optimizer``."""
        self.assign(parameters_of(optimizer))
        own = {index for index, parameter in enumerate(parameters_of(optimizer)) if self.owns(parameter)}
        return {**state, "state": {index: entry for index, entry in state["state"].items() if index in own}}

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Collect on machine 0, and nowhere else, the state of which each machine has a part.

        Args:
            state: what the optimizer's ``state_dict`` gives here.

        Raises:
            MachineLostError: another machine is gone or does not answer.
        """
        own: dict[int, dict[str, Any]] = state["state"]
        described = {index: {key: _Sent.of(value) for key, value in entry.items()} for index, entry in own.items()}
        everywhere: list[Any] = [None] * len(self._elements)
        whole = dict(own)
        with naming_lost_machines("while the state of an optimizer was collected"):
            dist.all_gather_object(everywhere, described)
            for owner, entries in enumerate(everywhere):
                if owner == 0 or self._rank not in (0, owner):
                    continue
                for index, entry in entries.items():
                    for key, value in entry.items():
                        if isinstance(value, _Sent) and self._rank == owner:
                            dist.send(_bytes(own[index][key]), 0)
                        elif isinstance(value, _Sent):
                            entry[key] = value.receive(owner)
                    if self._rank == 0:
                        whole[index] = entry
        return {**state, "state": dict(sorted(whole.items()))}


class _Sent:
    """A tensor that comes by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    @staticmethod
    def of(value: Any) -> Any:
        return _Sent(value) if isinstance(value, Tensor) else value

    def receive(self, source: int) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        dist.recv(_bytes(tensor), source)
        return tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups, in the order in which the optimizer's state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    room = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if bucket and (num_bytes > room or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        if not bucket:
            room = _BUCKET_BYTES
        bucket.append(parameter)
        room -= num_bytes
    if bucket:
        yield bucket
