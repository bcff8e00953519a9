"""An error anywhere reaches the caller as itself, soon, with a note; no thread is left, and the next fit is right.

That no test leaves a thread behind is what ``conftest.py`` checks; here is checked that none is left when ``fit`` ends.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.models import Residual, residual_batches, seeded

LONGEST_WAIT_S = 5.0
NUM_BLOCKS = 6
NUM_MICROBATCHES = 3


class Site(NamedTuple):
    """One place in a step: which block, which micro-batch, and its n-th forward pass or its backward pass."""

    block: int
    microbatch: int
    event: str  # "forward 0", "forward 1" (recomputation) or "backward"


class Planted(Exception):
    """Raised by :class:`Fragile`; no other code raises it."""


class _BackwardEvent(torch.autograd.Function):
    """Identity that reports when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, report: Callable[[], None]) -> Tensor:
        ctx.report = report
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.report()
        return gradient, None


class FragileBlock(nn.Module):
    """A residual linear block that reports every event of every micro-batch to its owner."""

    def __init__(self, number: int, reached: Callable[[Site], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.number = number
        self.reached = reached
        self.passes: Counter[int] = Counter()

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        count = self.passes[microbatch]
        self.passes[microbatch] += 1
        self.reached(Site(self.number, microbatch, f"forward {count}"))
        x = x + torch.tanh(self.linear(x))
        if not torch.is_grad_enabled():
            return x
        return _BackwardEvent.apply(x, lambda: self.reached(Site(self.number, microbatch, "backward")))


class Fragile(L.LightningModule):
    """Raises at one site. Its batches are ``(inputs of (B, 8), number of the row's micro-batch of (B,))``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FragileBlock(number, self._reached) for number in range(NUM_BLOCKS))
        self.head = nn.Linear(8, 1)
        self.act: Callable[[], None] = lambda: None
        self.arm(None)

    def arm(self, site: Site | None, act: Callable[[], None] | None = None) -> None:
        """The next time that ``site`` is reached, ``act`` is called; raising :class:`Planted` if not given."""
        self.site = site
        self.act = act or self._raise
        self.sites: list[Site] = []
        for block in self.blocks:
            block.passes.clear()

    def _raise(self) -> None:
        raise Planted(str(self.site))

    def _reached(self, site: Site) -> None:
        self.sites.append(site)
        if site == self.site:
            self.act()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, microbatch = batch[0], int(batch[1][0])
        for block in self.blocks:
            x = block(x, microbatch)
        return self.head(x).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fragile_batches(num: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    microbatch = torch.arange(NUM_MICROBATCHES).repeat_interleave(2)
    return [(torch.randn(2 * NUM_MICROBATCHES, 8, generator=generator), microbatch) for _ in range(num)]


def ours() -> RoundPipeStrategy:
    return RoundPipeStrategy(num_microbatches=NUM_MICROBATCHES)


def fit(module: Fragile, devices: int = 2, num: int = 1) -> None:
    trainer_for(ours(), devices).fit(module, BatchDealer(fragile_batches(num)))


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    """All sites that a fit of one batch on two workers reaches, recomputation and backward among them."""
    module = seeded(Fragile)
    fit(module)
    reached = list(dict.fromkeys(module.sites))
    assert {site.event for site in reached} == {"forward 0", "forward 1", "backward"}, "nothing was recomputed"
    assert {(site.block, site.microbatch) for site in reached if site.event == "backward"} == {
        (block, microbatch) for block in range(NUM_BLOCKS) for microbatch in range(NUM_MICROBATCHES)
    }
    return reached


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    """Weights after one batch of plain training."""
    module = seeded(Fragile)
    trainer_for().fit(module, BatchDealer(fragile_batches()))
    return module.state_dict()


def assert_next_fit_is_right(module: Fragile, reference: dict[str, Tensor], devices: int = 2) -> None:
    module.arm(None)
    module.load_state_dict(seeded(Fragile).state_dict())
    fit(module, devices)
    for name, tensor in reference.items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("event", ["forward 0", "forward 1", "backward"])
@pytest.mark.parametrize("devices", [1, 3])
def test_original_exception_with_a_note(
    sites: list[Site], reference: dict[str, Tensor], event: str, devices: int
) -> None:
    module = seeded(Fragile)
    site = next(site for site in sites if site.event == event and site.microbatch == 1)
    module.arm(site)
    before, start = set(threading.enumerate()), time.monotonic()
    with pytest.raises(Planted, match=str(site.block)) as caught:
        fit(module, devices)
    assert time.monotonic() - start < LONGEST_WAIT_S
    assert set(threading.enumerate()) <= before
    note = " ".join(caught.value.__notes__)
    assert f"blocks.{site.block}" in note
    assert "micro-batch 1" in note
    assert "worker" in note
    assert "stage" in note
    assert_next_fit_is_right(module, reference, devices)


@pytest.mark.timeout(60)
def test_two_hundred_random_errors(sites: list[Site], reference: dict[str, Tensor]) -> None:
    """Random unit, micro-batch and direction; the trainer, too, is used again after its fit failed."""
    generator = random.Random(0)
    module = seeded(Fragile)
    before = set(threading.enumerate())
    trainer = trainer_for(ours(), 2)
    for attempt in range(200):
        site = generator.choice(sites)
        module.arm(site)
        start = time.monotonic()
        with pytest.raises(Planted) as caught:
            trainer.fit(module, BatchDealer(fragile_batches()))
        assert time.monotonic() - start < LONGEST_WAIT_S, f"attempt {attempt}, {site}"
        assert str(caught.value) == str(site), f"attempt {attempt}"
        assert set(threading.enumerate()) <= before, f"attempt {attempt}, {site}"
        if attempt % 20 == 0:
            assert_next_fit_is_right(module, reference)
    assert_next_fit_is_right(module, reference)


def test_error_in_validation(reference: dict[str, Tensor]) -> None:
    module = seeded(Fragile)
    module.arm(Site(2, 1, "forward 0"))
    trainer = trainer_for(ours(), 2)
    with pytest.raises(Planted) as caught:
        trainer.validate(module, BatchDealer(fragile_batches()))
    module.train()  # Lightning leaves the mode as it was when the error came.
    assert "blocks.2" in " ".join(caught.value.__notes__)
    assert_next_fit_is_right(module, reference)


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_error_in_code_around_the_units(place: str, reference: dict[str, Tensor]) -> None:
    class BreaksAround(Fragile):
        broken = True

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, microbatch = batch[0], int(batch[1][0])
            if self.broken and place == "before" and microbatch == 1:
                raise Planted
            for block in self.blocks:
                x = block(x, microbatch)
                if self.broken and place == "between" and microbatch == 1:
                    raise Planted
            loss = self.head(x).square().mean()
            if self.broken and place == "after" and microbatch == 1:
                raise Planted
            return loss

    module = seeded(BreaksAround)
    with pytest.raises(Planted) as caught:
        fit(module)
    assert "micro-batch 1" in " ".join(caught.value.__notes__)
    module.broken = False
    assert_next_fit_is_right(module, reference)


@pytest.mark.parametrize(
    "hook",
    [
        "setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_batch_start",
        "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
        "on_train_batch_end", "on_train_epoch_end",
    ],
)  # fmt: skip
def test_error_in_a_hook(hook: str, reference: dict[str, Tensor]) -> None:
    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise Planted

    module = seeded(type("BreaksInHook", (Fragile,), {hook: fail}))
    with pytest.raises(Planted):
        fit(module)
    assert_next_fit_is_right(seeded(Fragile), reference)


def test_error_in_the_optimizer(reference: dict[str, Tensor]) -> None:
    class BrokenSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            raise Planted

    class BreaksInUpdate(Fragile):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return BrokenSGD(self.parameters(), lr=0.1)

    with pytest.raises(Planted):
        fit(seeded(BreaksInUpdate))
    assert_next_fit_is_right(seeded(Fragile), reference)


def test_error_in_a_gradient_hook_of_a_parameter(reference: dict[str, Tensor]) -> None:
    """A hook registered by the user with ``register_full_backward_hook`` runs, and may raise."""
    module = seeded(Fragile)

    def fail(*args: Any) -> None:
        raise Planted

    handle = module.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(Planted):
        fit(module)
    handle.remove()
    assert_next_fit_is_right(module, reference)


def test_first_of_several_errors_is_raised() -> None:
    """All micro-batches fail: one error arrives, the others do not hide it, and it is not raised again later."""

    class AllFail(Fragile):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise Planted(str(int(batch[1][0])))

    with pytest.raises(Planted):
        fit(seeded(AllFail), devices=3)


@pytest.mark.parametrize("error", [KeyError, SystemExit, torch.OutOfMemoryError])
def test_type_of_the_exception_is_kept(error: type[BaseException]) -> None:
    module = seeded(Fragile)

    def act() -> None:
        raise error("planted")

    module.arm(Site(1, 1, "forward 0"), act)
    with pytest.raises(error, match="planted") as caught:
        fit(module)
    notes = " ".join(caught.value.__notes__)
    assert "blocks.1" in notes
    assert ("recompute='all'" in notes) == (error is torch.OutOfMemoryError)


@pytest.fixture
def interrupt_handler() -> Iterator[None]:
    """Lightning ignores further interrupts once it saw one; the handler is put back after the test."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("event", ["forward 0", "forward 1", "backward"])
@pytest.mark.usefixtures("interrupt_handler")
def test_interrupt_while_the_step_runs(sites: list[Site], reference: dict[str, Tensor], event: str) -> None:
    """Ctrl-C while the main thread waits for the micro-batches leads to Lightning's graceful stop."""
    module = seeded(Fragile)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # The main thread handles it while this micro-batch is still running.

    class Seen(L.Callback):
        def __init__(self) -> None:
            self.exceptions: list[BaseException] = []

        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            self.exceptions.append(exception)

    module.arm(next(site for site in sites if site.event == event), interrupt)
    seen = Seen()
    before, start = set(threading.enumerate()), time.monotonic()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer_for(ours(), 2, callbacks=[seen]).fit(module, BatchDealer(fragile_batches(3)))
    assert time.monotonic() - start < LONGEST_WAIT_S
    assert set(threading.enumerate()) <= before, "user code may still run in the thread that is left"
    assert [type(exception) for exception in seen.exceptions] == [KeyboardInterrupt]
    assert_next_fit_is_right(module, reference)


def test_module_on_another_device_or_shape_of_batch_is_reported_by_torch() -> None:
    """A wrong batch gives torch's own error, not one about tickets or threads."""
    module = seeded(Fragile)
    batch = (torch.randn(6, 9), torch.arange(6))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer_for(ours(), 2).fit(module, BatchDealer([batch]))


class ChangesInput(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.linear(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # `pytest.warns` hands Lightning's own on without their module.
def test_input_changed_in_place_is_recomputed_from_what_it_was() -> None:
    class Changes(Residual):
        def __init__(self) -> None:
            super().__init__(num_blocks=0)
            self.blocks = nn.ModuleList(ChangesInput() for _ in range(5))

    expected = train(lambda: seeded(Changes), residual_batches())
    with pytest.warns(UserWarning, match=r"`blocks\.0` changes its arguments in place"):
        found = train(lambda: seeded(Changes), residual_batches(), ours(), 2)
    assert_results_close(expected, found, rtol=1e-5)


def test_double_backward_is_refused() -> None:
    """A gradient penalty needs the graph of the whole forward pass, which streaming does not keep."""

    class Penalised(Residual):
        def loss(self, batch: Any) -> Tensor:
            x = self.embed(batch[0])
            y = x
            for block in self.blocks:
                y = block(y)
            (gradient,) = torch.autograd.grad(self.head(y).square().mean(), x, create_graph=True)
            return gradient.square().mean()

    with pytest.raises(RuntimeError, match=r"autograd\.grad.*unit"):
        train(lambda: seeded(Penalised), residual_batches(), ours(), 2)
