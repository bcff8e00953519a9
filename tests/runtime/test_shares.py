"""Who updates what, and how the others hear of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_roundpipe.runtime.shares import UpdateShares
from tests.helpers.machines import Machine, Machines, of_machine


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_shares_are_even_and_stay() -> None:
    parameters = parameters_of((8,), (3,), (5,), (9,), (2, 2))
    shares = [UpdateShares(rank, 2) for rank in range(2)]
    for share in shares:
        share.assign(parameters)
    owned = [[share.owns(parameter) for parameter in parameters] for share in shares]
    assert owned == [[False, True, False, True, True], [True, False, True, False, False]]
    (late,) = parameters_of((100,))
    for share in shares:
        share.assign([*parameters, late])
    assert [share.owns(late) for share in shares] == [False, True]
    assert [[share.owns(parameter) for parameter in parameters] for share in shares] == owned


def exchange(machine: Machine) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=machine.rank, world_size=machine.count)
    parameters = [
        *parameters_of((4,), (3, 2), (), (0,)),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)),
    ]
    shares = UpdateShares(machine.rank, machine.count)
    shares.assign(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for index, parameter in enumerate(parameters):
        if shares.owns(parameter):
            with torch.no_grad():
                parameter.fill_(index + 1)
            optimizer.state[parameter] = {"momentum": torch.full_like(parameter, index), "step": index, "none": None}
    shares.exchange(parameters, dist.group.WORLD)
    whole = shares.whole_state(optimizer.state_dict())
    return {"values": [p.detach() for p in parameters], "whole": whole, "part": shares.own_part(optimizer, whole)}


def test_results_and_state_reach_the_others(machines: Machines) -> None:
    results = machines.run(exchange, count=3)
    for rank in range(3):
        values: list[Tensor] = of_machine(rank, results)["values"]
        assert all(torch.equal(value, torch.full_like(value, index + 1)) for index, value in enumerate(values))
    whole = of_machine(0, results)["whole"]["state"]
    assert list(whole) == list(range(6))
    for index, entry in whole.items():
        assert entry["step"] == index and entry["none"] is None
        assert torch.equal(entry["momentum"], torch.full_like(values[index], index))
    parts = [set(of_machine(rank, results)["whole"]["state"]) for rank in (1, 2)]
    assert all(parts) and not parts[0] & parts[1]
    assert 0 < len(of_machine(0, results)["part"]["state"]) < 6
