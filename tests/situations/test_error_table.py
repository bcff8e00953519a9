"""Wherever something fails: the original exception within five seconds, nothing left behind, and a right next fit."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import trainer_for
from tests.helpers.models import Residual, residual_batches, seeded
from tests.helpers.shim import gpu_workers_on_the_host

LONGEST_WAIT_S = 5.0
NUM_STEPS = 4


class Planted(Exception):
    """Raised by the tests; no other code raises it."""


def fail(*args: Any) -> None:
    raise Planted


def send(number: signal.Signals) -> Callable[..., None]:
    def act(*args: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.1)  # The main thread handles it while this micro-batch still runs.

    return act


class Slow(torch.optim.AdamW):
    """Takes long enough to reach into the next step; does what it is told to in the thread that has a name."""

    thread = ""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.01)
        if threading.current_thread().name == self.thread:
            fail()
        return super().step(closure)


class Breakable(Residual):
    """Calls ``act`` once, at ``place``, in its third step. Gradients exist only in recomputation in its first block.

    Attributes:
        reached: whether an update was under way when that happened, for the places in the forward pass.
    """

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.place = ""
        self.act: Callable[..., None] = fail
        self.blocks[0].register_forward_hook(lambda *_: self.at("recomputation" if self.recomputes() else "forward"))
        self.blocks[0].register_full_backward_hook(lambda *_: self.at("backward hook"))

    def recomputes(self) -> bool:
        return self.trainer.training and torch.is_grad_enabled()

    def at(self, place: str) -> None:
        if place == self.place and self.trainer.global_step == 2:
            self.place = ""
            self.act()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.at("user code")
        return loss

    def on_train_epoch_end(self) -> None:
        if self.place == "hook":
            fail()

    def configure_optimizers(self) -> Any:
        optimizer = Slow(self.parameters(), lr=1e-2)
        optimizer.thread = self.place
        return optimizer


class Breaks(L.Callback):
    """Fails after a batch; it may look at weights, so that no update reaches into the next step."""

    def on_train_batch_end(self, *args: Any) -> None:
        fail()


class Rows(Dataset[Any]):
    """One batch an item; one of them may be broken."""

    def __init__(self, broken: int = -1) -> None:
        self.batches = residual_batches(NUM_STEPS, positions=3)
        self.broken = broken

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            fail()
        return self.batches[index]


def fit(module: L.LightningModule, overlap: str, broken: int = -1, **flags: Any) -> dict[str, Tensor]:
    strategy = RoundPipeStrategy(num_microbatches=3, optimizer_overlap=overlap, recompute="all")
    loader = DataLoader(Rows(broken), batch_size=None, num_workers=int(broken >= 0))
    torch.manual_seed(1)
    trainer_for(strategy, 2, **flags).fit(module, loader)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@contextmanager
def soon_and_clean() -> Iterator[None]:
    """Fails after five seconds, or if threads, open files or signal handlers are not what they were."""

    def state() -> tuple[set[int | None], int]:
        gc.collect()
        return {thread.ident for thread in threading.enumerate()}, len(os.listdir("/proc/self/fd"))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, files = state()
    start = time.monotonic()
    try:
        yield
        assert time.monotonic() - start < LONGEST_WAIT_S
        threads_after, files_after = state()
        assert threads_after <= threads
        assert files_after <= files
        assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
    finally:
        # Lightning ignores further interrupts once it saw one.
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    """Weights after a fit in which nothing fails."""
    return {overlap: fit(seeded(Breakable), overlap) for overlap in ("off", "exact", "stale")}


INTERRUPTED = (KeyboardInterrupt, SystemExit)
IN_THE_STEP = ["forward", "recomputation", "backward hook", "user code"]
TABLE: list[tuple[str, Any, Any]] = [
    *((place, fail, Planted) for place in [*IN_THE_STEP, "roundpipe-updater", "roundpipe-pending-step"]),
    *((place, fail, Planted) for place in ["hook", "callback", "dataloader worker"]),
    *((place, send(signal.SIGINT), INTERRUPTED) for place in IN_THE_STEP),
    *((place, send(signal.SIGTERM), SystemExit) for place in IN_THE_STEP),
]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc")
@pytest.mark.filterwarnings("ignore")  # Of forks, and Lightning's about what it can not go on from.
@pytest.mark.parametrize(("overlap", "worker"), [("off", "host"), ("exact", "host"), ("stale", "gpu")])
@pytest.mark.parametrize(("place", "act", "error"), TABLE)
def test_original_exception_soon_and_nothing_left(
    place: str, act: Any, error: Any, overlap: str, worker: str,
    expected: dict[str, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if place.startswith("roundpipe") and overlap == "off":
        pytest.skip("the optimizer steps in the main thread")
    if place == "dataloader worker" and overlap != "exact":
        pytest.skip("takes long, and has nothing to do with updates")
    if worker == "gpu":
        gpu_workers_on_the_host(monkeypatch)
    module = seeded(Breakable)
    module.place, module.act = place, act
    flags: dict[str, Any] = {"callbacks": [Breaks()]} if place == "callback" else {}
    if place == "roundpipe-pending-step":
        flags["gradient_clip_val"] = 0.5  # Then all of the update comes after the backward pass.
    with soon_and_clean(), pytest.raises(error):
        fit(module, overlap, broken=2 if place == "dataloader worker" else -1, **flags)
    module.place = ""
    module.load_state_dict(seeded(Breakable).state_dict())
    for name, tensor in fit(module, overlap).items():
        assert torch.equal(tensor, expected[overlap][name]), name
