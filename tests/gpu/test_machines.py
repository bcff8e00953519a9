"""Two processes that share a GPU stand for two machines: gradients land in pinned memory and are averaged there."""

from typing import Any

import pytest
import torch

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import relative_difference, train
from tests.helpers.machines import Machine, Machines, of_machine, portable
from tests.helpers.models import CASES
from tests.strategy.test_machines import Logs, residual_batches, seeded

pytestmark = pytest.mark.gpu

EXACT, OFF = {"optimizer_overlap": "exact"}, {"optimizer_overlap": "off"}


def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def fit(machine: Machine, name: str, options: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    full_precision()
    case = CASES[name]
    strategy = RoundPipeStrategy(num_microbatches=2, gpu_memory_limit=0.3, timeout=60, **options)
    batches = machine.part(case.batches())
    result = train(case.module, batches, strategy, 1, accelerator="gpu", num_nodes=machine.count, **flags)
    return {**portable(result), "losses": [], "metrics": {}}


@pytest.mark.parametrize(
    "name, options, flags",
    [
        ("qwen3_tied", EXACT, {}),
        ("residual", OFF, {"accumulate_grad_batches": 2}),
        ("mlp", EXACT, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
        ("mlp", {**EXACT, "shard_optimizer_state": True}, {}),
        ("residual", {**EXACT, "workers_per_device": 2}, {}),
    ],
    ids=str,
)
def test_equals_one_machine_on_the_joint_batch(
    machines: Machines, name: str, options: dict[str, Any], flags: dict[str, Any]
) -> None:
    full_precision()
    results = machines.run(fit, name, options, flags)
    expected = train(CASES[name].module, CASES[name].batches(), accelerator="gpu", **flags)
    for rank in range(2):
        found = of_machine(rank, results)["state"]
        for key, tensor in expected.state.items():
            assert relative_difference(tensor.cpu(), found[key]) <= 1e-5, key


def log_from_gpus(machine: Machine) -> dict[str, Any]:
    full_precision()
    batches = machine.part(residual_batches())
    strategy = RoundPipeStrategy(num_microbatches=2, gpu_memory_limit=0.3, timeout=60)
    flags = {"accelerator": "gpu", "num_nodes": machine.count, "val_batches": batches}
    found = train(lambda: seeded(Logs), batches, strategy, 1, **flags)
    return {"metrics": {name: float(value) for name, value in found.metrics.items()}, **found.module.found}


def test_values_on_gpus_are_logged_and_gathered(machines: Machines) -> None:
    """torchmetrics sends its state from the GPU by itself, through gloo."""
    one, two = (of_machine(rank, results) for results in [machines.run(log_from_gpus)] for rank in range(2))
    for name in ("loss_epoch", "accuracy", "val_loss", "rank_epoch"):
        assert one["metrics"][name] == pytest.approx(two["metrics"][name])
    assert one["metrics"]["rank_epoch"] == 1
    assert one["gathered"].tolist() == [[1, 0], [1, 1]]
    assert float(one["mean"]) == 0.5
