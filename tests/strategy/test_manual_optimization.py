"""Steps that call backward and step optimizers themselves give what plain Lightning gives, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanMetric

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import UnsupportedUseError
from tests.helpers.equivalence import TrainResult, assert_results_equal, train
from tests.helpers.models import Block, Counter, residual_batches, seeded, vector_batches

WIDTH = 16


def ours(**options: Any) -> RoundPipeStrategy:
    return RoundPipeStrategy(**options)


def blocks(*layers: nn.Module, count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block(WIDTH) for _ in range(count)), *layers)


class Manual(L.LightningModule):
    """A model of blocks under manual optimization; subclasses say what a step does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = blocks(nn.Linear(WIDTH, 10), count=3)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def assert_like_plain(
    module: Callable[[], L.LightningModule],
    batches: list[Any] | None = None,
    devices: tuple[int, ...] = (1, 3),
    **flags: Any,
) -> TrainResult:
    """Plain fit and streamed fits of ``module`` end with the same bits."""
    batches = vector_batches(WIDTH) if batches is None else batches
    expected = train(lambda: seeded(module), batches, **flags)
    for number in devices:
        found = train(lambda: seeded(module), batches, ours(), number, **flags)
        assert_results_equal(expected, found)
    started = seeded(module).state_dict()
    assert any(not torch.equal(started[name], tensor) for name, tensor in found.module.state_dict().items())
    return found


class OneOptimizer(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_one_optimizer(devices: int, precision: str) -> None:
    assert_like_plain(OneOptimizer, devices=(devices,), precision=precision)


def test_loss_scaling() -> None:
    """The loss is scaled for each optimizer; a gradient that overflows skips the step and halves the scale."""

    class Module(Gan):
        def judge(self, images: Tensor, real: bool) -> Tensor:
            return super().judge(images, real) * (1.0 if self.trainer.global_step != 4 else torch.inf)

    def fit(strategy: Any, devices: int) -> TrainResult:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return train(lambda: seeded(Module), gan_batches(), strategy, devices, plugins=[plugin])

    expected, found = fit("auto", 1), fit(ours(), 2)
    assert_results_equal(expected, found)
    assert found.trainer.precision_plugin.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
@pytest.mark.parametrize("kind", [{"foreach": True}, {"foreach": False}])
def test_optimizers(optimizer: type[torch.optim.Optimizer], kind: dict[str, bool]) -> None:
    class Module(OneOptimizer):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=1e-2, **kind)

    assert_like_plain(Module, devices=(2,))


class Gan(L.LightningModule):
    """Generator and discriminator in turn, as in Lightning's own example; the noise is the batch's."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = blocks(nn.Linear(WIDTH, WIDTH), count=3)
        self.discriminator = blocks(nn.Linear(WIDTH, 1))

    def judge(self, images: Tensor, real: bool) -> Tensor:
        verdict = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, noise = batch
        for_generator, for_discriminator = self.optimizers()

        self.toggle_optimizer(for_generator)
        fake = self.generator(noise)
        loss = self.judge(fake, real=True)
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        assert all(p.grad is None or not p.grad.any() for p in self.discriminator.parameters())
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        loss = (self.judge(real, real=True) + self.judge(self.generator(noise).detach(), real=False)) / 2
        self.log("discriminator", loss, prog_bar=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
        )


def gan_batches(num: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)) for _ in range(num)
    ]


def test_gan() -> None:
    found = assert_like_plain(Gan, gan_batches(), devices=(1, 2, 3), max_epochs=2)
    assert found.trainer.global_step == 16
    assert all(parameter.requires_grad for parameter in found.module.parameters())


def test_gan_whose_losses_share_one_forward_pass() -> None:
    """The discriminator's loss is computed, but not differentiated, before the generator's is."""

    class Shared(Gan):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            real, noise = batch
            for_generator, for_discriminator = self.optimizers()
            fake = self.generator(noise)
            against = (self.judge(real, real=True) + self.judge(fake.detach(), real=False)) / 2
            loss = self.judge(fake, real=True)
            for_discriminator.zero_grad()
            for_generator.zero_grad()
            self.manual_backward(against, retain_graph=True)
            kept = [parameter.grad.clone() for parameter in self.discriminator.parameters()]
            self.manual_backward(loss)
            with torch.no_grad():
                for parameter, gradient in zip(self.discriminator.parameters(), kept, strict=True):
                    parameter.grad.copy_(gradient)
            for_discriminator.step()
            for_generator.step()

    assert_like_plain(Shared, gan_batches(), devices=(2,))


def test_gan_with_clipped_weights_and_critic_steps() -> None:
    """Several critic steps for each of the generator, weights clipped through ``data``, flags set by hand."""

    class Wasserstein(Gan):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            real, noise = batch
            for_generator, for_critic = self.optimizers()
            self.discriminator.requires_grad_(True)
            for scale in (0.5, 1.0):
                for_critic.zero_grad()
                loss = (
                    self.discriminator(self.generator(noise * scale).detach()).mean() - self.discriminator(real).mean()
                )
                loss.backward()  # Works as `manual_backward` does.
                for_critic.step()
                for parameter in self.discriminator.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
            if batch_idx % 2:
                self.discriminator.requires_grad_(False)
                for_generator.zero_grad()
                loss = -self.discriminator(self.generator(noise)).mean()
                self.manual_backward(loss)
                for_generator.step()

    found = assert_like_plain(Wasserstein, gan_batches(), devices=(2,))
    assert max(float(p.abs().max()) for p in found.module.discriminator.parameters()) <= 0.1001


def test_accumulation_clipping_and_schedule_by_hand() -> None:
    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if (batch_idx + 1) % 2 == 0:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
                self.log("norm", norm)
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    found = assert_like_plain(Module, devices=(1, 2), max_epochs=2)
    assert found.trainer.global_step == 4 and found.metrics["norm"] <= 0.0501


def test_gradients_add_up_over_several_backwards() -> None:
    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            once = self.net[-1].weight.grad.clone()  # Looked up on the module: the master's all the same.
            self.manual_backward(self.loss(batch))
            torch.testing.assert_close(self.net[-1].weight.grad, 2 * once)
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            torch.testing.assert_close(self.net[-1].weight.grad, 4 * once)
            optimizer.step()

    assert_like_plain(Module)


def test_closures() -> None:
    """An optimizer that evaluates the loss itself, several times, with other weights each time."""

    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    assert_like_plain(Module, devices=(2,))


@pytest.mark.parametrize("how", ["data", "no_grad", "lerp", "attribute"])
def test_teacher_that_follows_the_student(how: str) -> None:
    """The teacher is a moving average of the student, updated in the step and used again in it."""

    class MeanTeacher(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def follow(self) -> None:
            pairs = list(zip(self.teacher.parameters(), self.net.parameters(), strict=True))
            if how == "data":
                for old, new in pairs:
                    old.data.mul_(0.9).add_(new.data, alpha=0.1)
            elif how == "no_grad":
                with torch.no_grad():
                    for old, new in pairs:
                        old.copy_(0.9 * old + 0.1 * new)
            elif how == "lerp":
                with torch.no_grad():
                    torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 0.1)
            else:
                self.teacher[0].up.weight.data.mul_(0.9).add_(self.net[0].up.weight.data, alpha=0.1)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                with torch.no_grad():
                    target = self.teacher(batch[0]).softmax(-1)
                loss = F.cross_entropy(self.net(batch[0]), target) + self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.follow()
            self.log("target", target.max())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    assert_like_plain(MeanTeacher, devices=(2,))


def test_optimizer_without_lightnings_wrapper() -> None:
    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            for _ in range(2):
                optimizer.zero_grad()
                self.loss(batch).backward()
                optimizer.step()

    assert_like_plain(Module, devices=(2,))


def test_weights_outside_of_units_and_tied_ones() -> None:
    class Tied(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH)
            self.net = blocks()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                logits = F.linear(self.net(self.embed(batch[0])), self.embed.weight) * self.scale.exp()
                penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
                loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) + 1e-3 * penalty
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    expected = train(lambda: seeded(Tied).double(), residual_batches())
    found = train(lambda: seeded(Tied).double(), residual_batches(), ours(), 2)
    # Penalty and layers add to a gradient in another order.
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_dropout_repeats_and_buffers_count_once() -> None:
    class Module(OneOptimizer):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Sequential(Block(WIDTH, dropout=0.5), Counter()), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10)
            )

    results = [train(lambda: seeded(Module), vector_batches(WIDTH), ours(), devices) for devices in (1, 2)]
    assert_results_equal(*results)
    assert (
        int(results[0].module.net[0][1].calls)
        == len(vector_batches(WIDTH))
        == int(results[0].module.net[1].num_batches_tracked)
    )

    class WithoutDropout(OneOptimizer):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Sequential(Block(WIDTH), Counter()), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10)
            )

    assert_like_plain(WithoutDropout, devices=(2,))


def test_logging_and_metrics_inside_units_count_once() -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(WIDTH)
            self.mean = MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            self.mean(x.detach())
            return self.block(x)

    class Module(OneOptimizer):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Measured(), nn.Linear(WIDTH, 10))
            self.steps = 0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.steps += 1
            self.log("gradient", self.net[1].weight.grad.norm())

        def on_train_epoch_end(self) -> None:
            self.log("mean", self.net[0].mean.compute())
            self.log("updates", float(self.net[0].mean._update_count))

    found = assert_like_plain(Module, devices=(2,))
    assert found.metrics["updates"] == found.module.steps == len(vector_batches(WIDTH))


def test_hooks_see_the_gradients() -> None:
    seen: dict[str, list[Tensor]] = {}

    def module(key: str) -> L.LightningModule:
        class Module(OneOptimizer):
            def on_after_backward(self) -> None:
                seen.setdefault(key, []).append(self.net[0].up.weight.grad.clone())

            def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
                (2 * loss).backward(*args, **kwargs)

        built = seeded(Module)
        built.net[1].up.weight.register_hook(lambda gradient: gradient * 3)
        return built

    expected = train(lambda: module("plain"), vector_batches(WIDTH))
    assert_results_equal(expected, train(lambda: module("ours"), vector_batches(WIDTH), ours(), 2))
    for one, two in zip(seen["plain"], seen["ours"], strict=True):
        assert torch.equal(one, two)


def test_resumed_in_the_middle(tmp_path: Any) -> None:
    def fit(stop: int, ckpt_path: str | None = None) -> TrainResult:
        return train(lambda: seeded(Gan), gan_batches(), ours(), 2, max_steps=stop, max_epochs=-1, ckpt_path=ckpt_path)

    whole = fit(12)
    fit(6).trainer.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    resumed = fit(12, path)
    for name, tensor in whole.state.items():
        assert torch.equal(resumed.state[name], tensor), name
    for name, tensor in whole.optimizer.items():
        assert torch.equal(resumed.optimizer[name], tensor), name


def test_output_is_detached_and_on_the_host() -> None:
    outputs: list[Any] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, output: Any, *args: Any) -> None:
            outputs.append(output)

    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "logits": self.net(batch[0]), "name": "x"}

    train(lambda: seeded(Module), vector_batches(WIDTH, num=1), ours(), 2, callbacks=[Keep()])
    assert outputs[0]["logits"].shape == (6, 10) and not outputs[0]["logits"].requires_grad
    assert outputs[0]["name"] == "x"


def test_several_micro_batches_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"run once for each batch.*Use.*num_microbatches=1"):
        train(lambda: seeded(OneOptimizer), vector_batches(WIDTH), ours(num_microbatches=2), 2)


def refusal(step: Callable[[Any, Any], Any]) -> str:
    """What a manual step is refused with; the trainer goes on with the same module afterwards."""

    class Module(Manual):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            return step(self, batch)

    with pytest.raises(UnsupportedUseError) as error:
        train(lambda: seeded(Module), vector_batches(WIDTH, num=1), ours(), 2)
    assert "manual optimization" in error.value.__notes__[-1]
    return str(error.value)


def test_backward_twice_without_retaining_is_refused() -> None:
    def step(module: Any, batch: Any) -> None:
        loss = module.loss(batch)
        module.manual_backward(loss)
        module.manual_backward(loss)

    assert "retain_graph=True" in refusal(step)


def test_weights_changed_before_the_backward_are_refused() -> None:
    """Plain PyTorch refuses that, too: the graph holds weights that were overwritten."""

    def step(module: Any, batch: Any) -> None:
        first, second = module.loss(batch), module.loss(batch)
        module.manual_backward(first)
        module.optimizers().step()
        module.manual_backward(second)

    assert "was changed (by `optimizer.step()`?) between a call" in refusal(step)


def test_other_ways_to_differentiate_are_refused() -> None:
    assert "create_graph" in refusal(
        lambda module, batch: module.manual_backward(module.loss(batch), create_graph=True)
    )
    assert "something else than" in refusal(lambda module, batch: torch.autograd.backward([module.loss(batch)]))
    assert "through a streamed unit none can" in refusal(
        lambda module, batch: torch.autograd.grad(module.loss(batch), module.net[0].up.weight)
    ).replace("Through", "through")


def test_error_in_a_manual_step_leaves_nothing_behind() -> None:
    class Fails(OneOptimizer):
        fails = True

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.fails and batch_idx == 1:
                raise KeyError("mine")
            return loss

    module = seeded(Fails)
    with pytest.raises(KeyError, match="mine") as error:
        train(lambda: module, vector_batches(WIDTH), ours(), 2)
    assert "in user code between units" in error.value.__notes__[-1]
    assert type(module._parameters) is dict and "log" not in vars(module)
    module.fails = False
    module.load_state_dict(seeded(Fails).state_dict())
    found = train(lambda: module, vector_batches(WIDTH), ours(), 2)
    assert_results_equal(train(lambda: seeded(OneOptimizer), vector_batches(WIDTH)), found)
