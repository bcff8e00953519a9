"""`plan`, `replica_groups` and `show_plan`: which schedule runs, and that the numbers stay those of plain training."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import PlanError, UnsupportedUseError
from lightning_roundpipe.plan.files import load_schedule, save_schedule
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.runtime import planning
from tests.helpers.equivalence import (
    BatchDealer,
    TrainResult,
    assert_equivalent,
    assert_results_close,
    assert_results_equal,
    train,
    trainer_for,
)
from tests.helpers.models import (
    CASES,
    BatchNormCNN,
    Block,
    Classifier,
    Residual,
    residual_batches,
    seeded,
    vector_batches,
)

NUM_CALLS = 7
RANK_ZERO = "lightning.pytorch.utilities.rank_zero"


class Noisy(Residual):
    """Dropout in every block and between them, and a layer whose kernels depend on whether there is a graph."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) + 0.1 * torch.rand_like(x)
        return self.head(nn.functional.dropout(self.lstm(x)[0], 0.2, self.training))


def fit(strategy: RoundPipeStrategy, devices: int = 3, epochs: int = 3, **options: Any) -> TrainResult:
    return train(lambda: seeded(Noisy), residual_batches(), strategy, devices, max_epochs=epochs, **options)


@pytest.fixture
def poor_first_plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A first plan that any search improves on: one worker does nearly everything."""
    plan = Plan((NUM_CALLS - 1,), 1, (NUM_CALLS - 1,))

    def balanced_plan(call_bytes: Sequence[int], num_workers: int) -> Plan:
        assert len(call_bytes) == NUM_CALLS
        return plan

    monkeypatch.setattr(planning, "balanced_plan", balanced_plan)
    return plan


# ------------------------------------------------------------------------------------------------------ a better plan


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_new_plan_does_not_change_a_bit(
    accumulate: int, poor_first_plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"accumulate_grad_batches": accumulate}
    strategy = RoundPipeStrategy(num_microbatches=6)
    with caplog.at_level(logging.INFO, RANK_ZERO):
        with_new_plan = fit(strategy, **flags)
    told = [record.message for record in caplog.records if record.message.startswith("New plan")]
    assert told
    assert "after 3 measured steps: forward: " in told[0]
    assert "Predicted step time: " in told[0]
    assert strategy.schedule is not None
    assert strategy.schedule.plan != poor_first_plan
    assert strategy.schedule.plan.num_calls == NUM_CALLS

    monkeypatch.setattr(planning, "_SEARCH_AFTER", ())
    strategy = RoundPipeStrategy(num_microbatches=6)
    without = fit(strategy, **flags)
    assert strategy.schedule is not None
    assert strategy.schedule.plan == poor_first_plan
    assert_results_equal(without, with_new_plan)


def test_a_new_plan_comes_between_training_steps_only(poor_first_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SEARCH_AFTER", (1,))
    strategy = RoundPipeStrategy(num_microbatches=3)
    seen: list[tuple[str, str]] = []

    class Watches(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert strategy.step_stats is not None
            seen.append(("training", str(strategy.step_stats.schedule.plan)))

        def on_validation_batch_end(self, *args: Any) -> None:
            assert strategy.step_stats is not None and not strategy.step_stats.schedule.plan.trains
            seen.append(("validation", str(strategy.schedule.plan if strategy.schedule else None)))

    fit(
        strategy,
        epochs=1,
        callbacks=[Watches()],
        val_batches=residual_batches(),
        limit_val_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
    )
    poor = str(poor_first_plan)
    assert seen[:4] == [("training", poor), ("training", poor), ("validation", poor), ("validation", poor)]
    assert seen[4][0] == "training" and seen[4][1] != poor


def test_pictures_are_shown_on_request(poor_first_plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, RANK_ZERO):
        fit(RoundPipeStrategy(num_microbatches=6, show_plan=True), devices=2, epochs=2)
    shown = [record.message for record in caplog.records if "worker  1 |" in record.message]
    assert shown[0].startswith("Plan: forward: 1 x 6 calls; fused: 1; backward: 1 x 6 calls")
    assert shown[1].startswith("New plan after")


# --------------------------------------------------------------------------------------------------------- plan files


def test_a_plan_is_saved_and_run_again(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(num_microbatches=6, replica_groups=2)
    assert strategy.schedule is None
    with pytest.raises(PlanError, match="no plan before the first training step"):
        strategy.save_plan(tmp_path / "plan.json")
    first = fit(strategy, devices=2)
    assert strategy.schedule is not None, "it outlives the fit"
    strategy.save_plan(tmp_path / "plan.json")
    assert load_schedule(tmp_path / "plan.json") == strategy.schedule

    again = RoundPipeStrategy(plan=tmp_path / "plan.json")  # with the number of micro-batches in the file
    assert_results_equal(first, fit(again, devices=2))
    assert again.schedule == strategy.schedule


ODD_SCHEDULES = {
    "rounds": Schedule(Plan((3, 3), 1, (2, 2, 2)), 2, 6, num_rounds=3),
    "rounds_in_groups": Schedule(Plan((3, 3), 1, (2, 2, 2)), 4, 6, replica_groups=2, num_rounds=2),
    "one_worker_has_most": Schedule(Plan((3, 3), 1, (3, 3)), 3, 6, stage_workers=((0, 0, 2, 0, 0),)),
    "unequal_groups": Schedule(Plan((3, 3), 1, (6,)), 2, 6, replica_groups=2, microbatch_groups=(0, 0, 0, 0, 1, 1)),
    "later_start": Schedule(Plan((3, 3), 1, (3, 3)), 3, 6, first_worker=2),
    "nothing_fused": Schedule(Plan((7,), 0, (3, 4)), 2, 6),
}


@pytest.mark.parametrize("name", ODD_SCHEDULES)
def test_every_schedule_gives_the_numbers_of_plain_training(name: str, tmp_path: Path) -> None:
    save_schedule(ODD_SCHEDULES[name], tmp_path / "plan.json")
    schedule = ODD_SCHEDULES[name]
    devices = schedule.num_workers
    strategy = RoundPipeStrategy(plan=tmp_path / "plan.json")
    found = fit(strategy, devices, epochs=1)
    assert strategy.schedule == schedule
    reference = fit(RoundPipeStrategy(num_microbatches=6), 1, epochs=1)
    assert_results_close(reference, found, rtol=1e-5)
    if schedule.num_parts == 1 and schedule.plan.fused == 1:
        assert_results_equal(reference, found)
    assert_results_equal(found, fit(RoundPipeStrategy(plan=tmp_path / "plan.json"), devices, epochs=1))


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        (Schedule(Plan((4,), 1, (4,)), 2, 6), "makes 7 in a micro-batch, but the one in the file covers 5"),
        (Schedule(Plan((6,), 1, (6,)), 3, 6), "is for 3 workers, but there are 2"),
        (Schedule(Plan((6,), 1, (6,)), 2, 4), "is for 4 micro-batches, but `num_microbatches` is 6"),
    ],
    ids=["calls", "workers", "micro-batches"],
)
def test_a_plan_that_does_not_fit_is_refused(schedule: Schedule, match: str, tmp_path: Path) -> None:
    save_schedule(schedule, tmp_path / "plan.json")
    trainer = trainer_for(RoundPipeStrategy(plan=tmp_path / "plan.json", num_microbatches=6), 2)
    with pytest.raises(PlanError, match=match):
        trainer.fit(seeded(Noisy), BatchDealer(residual_batches()))
    assert trainer.global_step == 0


def test_a_batch_of_fewer_samples_runs_by_the_same_plan(tmp_path: Path) -> None:
    save_schedule(ODD_SCHEDULES["unequal_groups"], tmp_path / "plan.json")
    batches = [*residual_batches(num=2), *residual_batches(num=1, rows=4)]
    strategy = RoundPipeStrategy(plan=tmp_path / "plan.json")
    found = train(lambda: seeded(Noisy), batches, strategy, 2)
    assert_results_close(train(lambda: seeded(Noisy), batches, RoundPipeStrategy(6)), found, rtol=1e-5)
    assert strategy.step_stats is not None and strategy.step_stats.schedule.num_microbatches == 4
    assert strategy.schedule == ODD_SCHEDULES["unequal_groups"]


# ----------------------------------------------------------------------------------------------------- replica groups


@pytest.mark.parametrize(("replica_groups", "overlap"), [(1, "off"), (2, "off"), (4, "off"), (2, "exact")])
@pytest.mark.parametrize("name", ["qwen3_tied", "llama_lora", "called_twice", "shared_block", "layer_drop", "u_shape"])
def test_replica_groups_give_the_numbers_of_plain_training(name: str, replica_groups: int, overlap: str) -> None:
    assert_equivalent(CASES[name], 4, 6, replica_groups=replica_groups, optimizer_overlap=overlap)


@pytest.mark.parametrize("replica_groups", [2, 4])
def test_replica_groups_give_the_same_bits_every_time(replica_groups: int) -> None:
    results = [fit(RoundPipeStrategy(6, replica_groups=replica_groups), devices=4) for _ in range(2)]
    assert_results_equal(*results)


def test_bits_depend_on_replica_groups_but_not_on_workers() -> None:
    two_workers, four_workers = (fit(RoundPipeStrategy(6, replica_groups=2), devices=devices) for devices in (2, 4))
    assert_results_equal(two_workers, four_workers)


def test_resumed_in_replica_groups_bit_for_bit(tmp_path: Path) -> None:
    """The step that finds the order of calls adds gradients up as any other step does."""

    class SavesAfterTwo(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    def run(**options: Any) -> TrainResult:
        strategy = RoundPipeStrategy(6, replica_groups=2)
        return train(lambda: seeded(lambda: Residual(dropout=0.5)), residual_batches(), strategy, 2, **options)

    whole, resumed = run(callbacks=[SavesAfterTwo()]), run(ckpt_path=str(tmp_path / "two.ckpt"))
    for name, tensor in whole.state.items():
        assert torch.equal(tensor, resumed.state[name]), name


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_fewer_micro_batches_than_replica_groups(num_microbatches: int) -> None:
    assert_equivalent(CASES["qwen3_tied"], 4, num_microbatches, replica_groups=4)


def test_replica_groups_must_divide_the_workers() -> None:
    trainer = trainer_for(RoundPipeStrategy(4, replica_groups=3), 4)
    with pytest.raises(PlanError, match="`replica_groups` must divide the number of workers"):
        trainer.fit(seeded(Residual), BatchDealer(residual_batches()))


def test_updates_of_buffers_are_not_lost_in_replica_groups() -> None:
    trainer = trainer_for(RoundPipeStrategy(4, replica_groups=2), 2)
    with pytest.raises(UnsupportedUseError, match=r"running_mean.*Use `replica_groups=1`"):
        trainer.fit(seeded(BatchNormCNN), BatchDealer(vector_batches(1, 8, 8)))


def test_replica_groups_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SEARCH_AFTER", (1,))
    strategy = RoundPipeStrategy(6, replica_groups="auto")
    found = train(lambda: seeded(Residual), residual_batches(), strategy, 2, max_epochs=2)
    assert strategy.schedule is not None
    assert strategy.schedule.replica_groups == 2
    assert_results_close(train(lambda: seeded(Residual), residual_batches(), max_epochs=2), found, rtol=1e-5)


def test_replica_groups_are_not_tried_where_buffers_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SEARCH_AFTER", (1, 2))
    strategy = RoundPipeStrategy(4, replica_groups="auto")

    def build() -> L.LightningModule:
        return Classifier(
            nn.Sequential(Block(16), nn.BatchNorm1d(16), *(Block(16) for _ in range(6)), nn.Linear(16, 10))
        )

    train(lambda: seeded(build), vector_batches(16, rows=8), strategy, 2)
    assert strategy.schedule is not None
    assert strategy.schedule.replica_groups == 1
