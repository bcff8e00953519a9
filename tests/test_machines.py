"""What the machines of a run compare and give each other before they train."""

import pickle
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_roundpipe.machines import Machines as Joined
from tests.helpers.machines import Failure, Machine, Machines, of_machine


def joined(machine: Machine, timeout_s: float = 30) -> Joined:
    machines = Joined("gloo", timedelta(seconds=timeout_s))
    machines.launched_by(LightningEnvironment(), machine.count)
    machines.join()
    return machines


def spread(machine: Machine) -> tuple[int, list[torch.Tensor]]:
    rank = machine.rank
    tensors = [
        torch.arange(6.0),
        torch.full((2, 3), float(rank)).t(),
        torch.tensor(rank == 0),
        torch.tensor(rank, dtype=torch.int64),
        torch.empty(0),
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.zeros(2**20),
    ]
    versions = [tensor._version for tensor in tensors]
    count = joined(machine).spread(tensors)
    changed = [tensor._version != version for tensor, version in zip(tensors, versions, strict=True)]
    assert changed == [False, True, True, True, False, True, False]  # Who watches for writes sees them.
    return count, tensors


def test_what_differs_becomes_that_of_machine_0(machines: Machines) -> None:
    for rank, result in enumerate(machines.run(spread, count=3)):
        assert not isinstance(result, Failure), f"{rank}: {result}"
        count, tensors = result
        assert count == 4
        assert [float(tensor.sum()) for tensor in tensors] == [15, 0, 1, 0, 0, 0, 0]


def compare(machine: Machine) -> None:
    facts: dict[str, Any] = {f"fact {number}": number * machine.rank for number in range(8)}
    joined(machine).check_alike(facts if machine.rank else {**facts, "more": None})


def test_message_lists_what_differs(machines: Machines) -> None:
    for result in machines.run(compare):
        assert isinstance(result, Failure)
        assert "these differ: fact 1: 0 on machine 0, 1 on machine 1; fact 2: 0 on" in result.message
        assert "and 3 more" in result.message


def come_alone(machine: Machine, who: int) -> str:
    if machine.rank == who:
        joined(machine, 0.5)
    return "stayed away"


def test_machines_that_stay_away(machines: Machines) -> None:
    for who in range(2):
        results = machines.run(come_alone, who)
        assert results[1 - who] == "stayed away"
        assert isinstance(results[who], Failure)
        assert results[who].names[0] == "MachineLostError"
        assert "before all 2 had joined" in results[who].message


def copied(machine: Machine) -> bool:
    machines = joined(machine)
    machines.open_gradient_group()
    copy = pickle.loads(pickle.dumps(machines))
    machines.leave()
    return machines.are_joined and not copy.are_joined and copy.count == 2


def test_copies_have_joined_nobody(machines: Machines) -> None:
    results = machines.run(copied)
    assert all(of_machine(rank, results) for rank in range(2))
