"""Replica groups and new plans on a GPU that workers share: one parameter lands twice at the same time; links."""

import pytest
import torch

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime import planning
from tests.gpu.test_training import fit, full_precision  # noqa: F401 - a fixture
from tests.helpers.equivalence import TrainResult, assert_results_close
from tests.helpers.models import CASES

pytestmark = pytest.mark.gpu


def assert_same_bits(one: TrainResult, two: TrainResult) -> None:
    for name, tensor in one.state.items():
        assert torch.equal(tensor, two.state[name]), name


@pytest.mark.parametrize("overlap", ["off", "exact"])
@pytest.mark.parametrize("replica_groups", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_tied", "called_twice"])
def test_replica_groups_give_the_numbers_of_plain_training(name: str, replica_groups: int, overlap: str) -> None:
    def strategy() -> RoundPipeStrategy:
        return RoundPipeStrategy(6, workers_per_device=4, replica_groups=replica_groups, optimizer_overlap=overlap)

    found = fit(CASES[name], strategy())
    assert_results_close(fit(CASES[name]), found, rtol=1e-5)
    assert_same_bits(found, fit(CASES[name], strategy()))


def test_a_new_plan_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "balanced_plan", lambda sizes, _: Plan((len(sizes) - 1,), 1, (len(sizes) - 1,)))
    case = CASES["qwen3_tied"]
    with_new_plan = RoundPipeStrategy(6, workers_per_device=3)
    found = fit(case, with_new_plan, max_epochs=3)
    monkeypatch.setattr(planning, "_SEARCH_AFTER", ())
    without = RoundPipeStrategy(6, workers_per_device=3)
    assert_same_bits(fit(case, without, max_epochs=3), found)
    assert with_new_plan.schedule != without.schedule
