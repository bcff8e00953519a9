"""Buckets, their order, and what machines tell each other with them."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.collectives import GradientReducer, Reduction, ReductionRequest
from tests.helpers.equivalence import BatchDealer, trainer_for
from tests.helpers.machines import Failure, Machine, Machines, of_machine
from tests.helpers.models import Residual, residual_batches

pytestmark = pytest.mark.timing


def group_of(machine: Machine) -> dist.ProcessGroup:
    dist.init_process_group("gloo", rank=machine.rank, world_size=machine.count)
    return dist.group.WORLD


def tensors(*sizes: int) -> list[tuple[str, Tensor]]:
    return [(f"p{index}", nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]


def average(
    reducer: GradientReducer, gradients: Sequence[Tensor | None], completed: Sequence[int] = (), **request: Any
) -> list[Tensor | None]:
    parameters = [parameter for _, parameter in reducer.parameters]
    found = {id(parameter): gradient for parameter, gradient in zip(parameters, gradients, strict=True)}
    request = {"batch": 0, "is_last": False, **request}
    reduction = Reduction(reducer, ReductionRequest(**request), lambda p: found[id(p)])
    reduction.start()
    for index in completed:
        reduction.submit(parameters[index])
    reduction.finish()
    return [reduction.take(parameter) for parameter in parameters]


def buckets_and_orders(machine: Machine) -> list[Any]:
    parameters = tensors(10, 3, 3, 40, 2)
    reducer = GradientReducer(group_of(machine), parameters, bucket_bytes=40)
    first = [list(bucket) for bucket in reducer.buckets]
    # Machines complete gradients in different orders; one is never told of.
    average(reducer, [torch.ones(size) for size in (10, 3, 3, 40, 2)], [2, 4, 0, 1] if machine.rank == 0 else [1])
    return [first, [list(bucket) for bucket in reducer.buckets]]


def test_buckets_follow_the_order_of_machine_0(machines: Machines) -> None:
    results = machines.run(buckets_and_orders)
    for rank in range(2):
        first, agreed = of_machine(rank, results)
        assert first == [[4], [3], [2, 1], [0]]
        assert agreed == [[2, 4], [0], [1], [3]]


def kinds(machine: Machine, wire_dtype: torch.dtype | None, bucket_bytes: int) -> list[Any]:
    """Absent, sparse and dense gradients meet; some share memory with others or with themselves."""
    rank = machine.rank
    parameters = [*tensors(6, 6, 6, 6, 6, 6), ("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))]
    parameters.append(("h", nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))))
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (6,), check_invariants=True)

    def gradients(sparse: Tensor | None) -> list[Tensor | None]:
        shared = torch.full((6,), float(rank))
        return [
            shared,
            shared,
            torch.tensor(float(rank)).expand(6),
            None if rank == 0 else torch.ones(6),
            None,
            sparse,
            torch.full((2,), complex(1, rank), dtype=torch.complex64),
            torch.full((5,), 1.0 + rank, dtype=torch.bfloat16),
        ]

    # Some have a bucket together, some one of their own that is too small for them.
    reducer = GradientReducer(group_of(machine), parameters, wire_dtype, bucket_bytes)
    both = average(reducer, gradients(sparse if rank < 2 else None))
    mixed = average(reducer, gradients(sparse if rank else torch.ones(6)))
    return [*both, mixed[5]]


@pytest.mark.parametrize("bucket_bytes", [8, 2**20])
@pytest.mark.parametrize("wire_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_kinds_of_gradients(machines: Machines, wire_dtype: torch.dtype | None, bucket_bytes: int) -> None:
    for rank, result in enumerate(machines.run(kinds, wire_dtype, bucket_bytes, count=3)):
        assert not isinstance(result, Failure), f"{rank}: {result}"
        close = {"rtol": 0.0, "atol": 5e-3 if wire_dtype is torch.bfloat16 else 1e-7}
        for gradient in result[:3]:
            torch.testing.assert_close(gradient, torch.full((6,), 1.0), **close)
        torch.testing.assert_close(result[3], torch.full((6,), 2 / 3), **close)
        assert result[4] is None
        assert result[5].is_sparse
        torch.testing.assert_close(result[5].to_dense(), torch.tensor([1.0, 1, 0, 0, 0, 4]) / 3, **close)
        torch.testing.assert_close(result[6], torch.full((2,), complex(1, 1), dtype=torch.complex64), **close)
        torch.testing.assert_close(result[7], torch.full((5,), 2.0, dtype=torch.bfloat16))
        torch.testing.assert_close(result[8], torch.tensor([1.0, 2, 2, 1, 1, 5]) / 3, **close)


def at_other_places(machine: Machine, request: dict[str, Any], frozen: bool) -> None:
    sizes = (4, 4) if machine.rank == 0 or not frozen else (4,)
    reducer = GradientReducer(group_of(machine), tensors(*sizes))
    average(reducer, [torch.ones(size) for size in sizes], **(request if machine.rank else {}))


@pytest.mark.parametrize(
    "request_, frozen, said",
    [
        ({"batch": 3}, False, "some are at number 0, others at 3"),
        ({"is_last": True}, False, "ends with batch 0"),
        ({}, True, "train different parameters"),
    ],
)
def test_machines_at_different_places(machines: Machines, request_: dict[str, Any], frozen: bool, said: str) -> None:
    for result in machines.run(at_other_places, request_, frozen):
        assert isinstance(result, Failure)
        assert result.names[0] == "MachineMismatchError"
        assert said in result.message


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.02)
        return gradient


class SlowBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + _SlowBackward.apply(x @ self.weight)


def averages_and_end(machine: Machine, overlap: str) -> tuple[int, int]:
    """How many buckets were averaged in the last step, and how many of them before the backward pass had ended."""
    times: list[float] = []
    ends: list[float] = []
    average, finish = GradientReducer.average, Reduction.finish

    def timed_average(self: GradientReducer, *args: Any) -> Any:
        result = average(self, *args)
        times.append(time.perf_counter())
        return result

    def timed_finish(self: Reduction, **options: Any) -> None:
        ends.append(time.perf_counter())
        finish(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_roundpipe.strategy.GradientReducer", partial(GradientReducer, bucket_bytes=1024))
        patch.setattr(GradientReducer, "average", timed_average)
        patch.setattr(Reduction, "finish", timed_finish)
        module = Residual()
        module.blocks = nn.ModuleList(SlowBlock() for _ in range(6))
        strategy = RoundPipeStrategy(num_microbatches=2, optimizer_overlap=overlap, timeout=30)
        trainer = trainer_for(strategy, 2, num_nodes=machine.count)
        trainer.fit(module, BatchDealer(machine.part(residual_batches(3))))
    assert strategy.step_stats.reduce_s >= 0
    last = [moment for moment in times if moment > ends[-2]]
    return len(last), sum(moment < ends[-1] for moment in last)


@pytest.mark.parametrize("overlap", ["exact", "off"])
def test_averaging_runs_along_with_the_backward_pass(machines: Machines, overlap: str) -> None:
    results = machines.run(averages_and_end, overlap)
    for rank in range(2):
        buckets, early = of_machine(rank, results)
        assert buckets >= 8
        assert early >= 5
