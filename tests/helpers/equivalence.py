"""Trains the same module on the same batches with and without the strategy, and compares everything that is left.

The reference is plain Lightning on one device, on whole batches.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.models import Case

__all__ = [
    "BatchDealer",
    "TrainResult",
    "as_float64",
    "assert_equivalent",
    "assert_results_close",
    "assert_results_equal",
    "double_batches",
    "in_microbatches",
    "reference",
    "relative_difference",
    "train",
    "trainer_for",
]


@dataclass
class TrainResult:
    """What a fit leaves behind.

    Attributes:
        state: parameters and buffers (non-persistent ones, too) by name.
        optimizer: tensors of the optimizer state as ``"{parameter index}.{key}"``.
        losses: for every batch what Lightning reports as its loss, None where the step was skipped.
        metrics: ``trainer.callback_metrics`` after the fit.
        learning_rates: of the first parameter group, after every batch.
    """

    module: L.LightningModule
    trainer: L.Trainer
    state: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    losses: list[Tensor | None]
    metrics: dict[str, Tensor]
    learning_rates: list[float] = field(default_factory=list)


class _Recorder(L.Callback):
    """Keeps loss and learning rate of every batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor | None] = []
        self.learning_rates: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.losses.append(None if loss is None else loss.detach().clone())
        if trainer.optimizers:
            self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class _BlindRecorder(_Recorder):
    """Passes for one of the package's own callbacks, which look at no weights: updates may still be under way."""

    __module__ = "lightning_roundpipe.callbacks"


class BatchDealer:
    """A dataloader that gives the batches as they are, in order, in every epoch.

    It is stateful: after a checkpoint in the middle of an epoch Lightning goes on with the batch that was next. A
    stateless loader would start over, and no resumed run could equal an uninterrupted one.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)
        self._next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        # Lightning stops at `len` without asking for more, so that an epoch ends here with `_next == len`.
        self._next %= len(self.batches)
        while self._next < len(self.batches):
            self._next += 1
            yield self.batches[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def trainer_for(strategy: Strategy | str = "auto", devices: int = 1, **flags: Any) -> L.Trainer:
    """A trainer, on the CPU, that prints nothing and writes nothing; ``flags`` override."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    defaults.update(flags)
    defaults.setdefault("default_root_dir", tempfile.gettempdir())
    return L.Trainer(devices=devices, strategy=strategy, **defaults)


def train(
    module_factory: Callable[[], L.LightningModule],
    batches: Iterable[Any],
    strategy: Strategy | str = "auto",
    devices: int = 1,
    *,
    callbacks: Iterable[L.Callback] = (),
    during: Callable[[L.Trainer], contextlib.AbstractContextManager[Any]] | None = None,
    val_batches: Iterable[Any] | None = None,
    ckpt_path: str | None = None,
    looks: bool = True,
    **flags: Any,
) -> TrainResult:
    """Fits a fresh module on the batches, one epoch unless the flags say otherwise.

    Args:
        module_factory: builds the module; must give the same weights at every call.
        batches: the batches of one epoch.
        strategy: strategy under test; ``"auto"`` is the plain single-device reference.
        devices: number of workers.
        callbacks: added to the trainer.
        during: called with the trainer; the fit runs within the context it returns.
        val_batches: batches of the validation loop.
        ckpt_path: checkpoint to resume from.
        looks: whether a callback may look at weights after each batch: no update reaches into the next step then.
        **flags: for the ``Trainer``.
    """
    recorder = _Recorder() if looks else _BlindRecorder()
    module = module_factory()
    trainer = trainer_for(strategy, devices, callbacks=[recorder, *callbacks], **flags)
    with torch.random.fork_rng(devices=[]), during(trainer) if during else contextlib.nullcontext():
        torch.manual_seed(1)
        trainer.fit(
            module,
            BatchDealer(batches),
            None if val_batches is None else BatchDealer(val_batches),
            ckpt_path=ckpt_path,
        )
    return TrainResult(
        module=module,
        trainer=trainer,
        state={name: tensor.detach().clone() for name, tensor in _named_tensors(module)},
        optimizer=_optimizer_tensors(trainer.optimizers),
        losses=recorder.losses,
        metrics={name: value.detach().clone() for name, value in trainer.callback_metrics.items()},
        learning_rates=recorder.learning_rates,
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    states = {
        f"{number}.{index}.{key}": value.detach().clone()
        for number, optimizer in enumerate(optimizers)
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return {name: value.to_dense() if value.is_sparse else value for name, value in states.items()}


# Models of transformers compute their loss in float32 even when they are float64 themselves.
_FLOAT32_RTOL = 1e-6
# A fit that went wrong differs everywhere; the first differences, losses first, say most.
_SHOWN = 12


def relative_difference(expected: Tensor, found: Tensor, scale: float | None = None) -> float:
    """max|expected - found| / max|expected|; infinite for another shape or dtype, or where only one of them is finite.

    Args:
        scale: divides in the place of max|expected|.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(expected, found):
        return 0.0
    expected, found = expected.double(), found.double()
    finite = expected.isfinite()
    same_place = torch.equal(finite, found.isfinite())
    if not same_place or not torch.equal(expected[~finite].nan_to_num(), found[~finite].nan_to_num()):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = float((expected - found)[finite].abs().max())
    if difference == 0.0:
        return 0.0
    return difference / max(float(expected[finite].abs().max()) if scale is None else scale, 1e-300)


def assert_results_close(expected: TrainResult, found: TrainResult, rtol: float, *, metrics: bool = True) -> None:
    """Fails, naming every tensor, if two fits differ by more than ``rtol`` relative to a tensor's greatest element.

    Optimizer state is compared relative to the greatest element that the same key has for any parameter: moments of a
    gradient that is zero but for rounding have no scale of their own.
    """
    wrong: list[str] = []

    def compare(kind: str, one: Mapping[str, Tensor], two: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        if one.keys() != two.keys():
            missing, surplus = sorted(one.keys() - two.keys()), sorted(two.keys() - one.keys())
            wrong.append(f"{kind}: missing {missing}, surplus {surplus}")
        for name in [name for name in one if name in two]:
            difference = relative_difference(one[name], two[name], scales.get(name))
            floor = _FLOAT32_RTOL if kind in ("loss", "metric") and one[name].dtype is torch.float32 and rtol else 0.0
            if difference > max(rtol, floor):
                wrong.append(
                    f"{kind} {name}: relative difference {difference:.3g}, shapes {tuple(one[name].shape)}"
                    f" {tuple(two[name].shape)}, dtypes {one[name].dtype} {two[name].dtype}"
                )

    def greatest_of_kind(tensors: Mapping[str, Tensor]) -> dict[str, float]:
        greatest: dict[str, float] = {}
        for name, tensor in tensors.items():
            kind = name.rsplit(".", 1)[1]
            greatest[kind] = max(greatest.get(kind, 0.0), float(tensor.abs().max()) if tensor.numel() else 0.0)
        return {name: greatest[name.rsplit(".", 1)[1]] for name in tensors}

    def numbered(losses: list[Tensor | None]) -> dict[str, Tensor]:
        return {str(step): loss for step, loss in enumerate(losses) if loss is not None}

    compare("loss", numbered(expected.losses), numbered(found.losses), {})
    compare("tensor", expected.state, found.state, {})
    compare("optimizer state", expected.optimizer, found.optimizer, greatest_of_kind(expected.optimizer))
    if metrics:
        compare("metric", expected.metrics, found.metrics, {})
    if expected.learning_rates != found.learning_rates:
        wrong.append(f"learning rates: expected {expected.learning_rates}, found {found.learning_rates}")
    if expected.trainer.global_step != found.trainer.global_step:
        wrong.append(f"global_step: expected {expected.trainer.global_step}, found {found.trainer.global_step}")
    more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    assert not wrong, "\n".join(wrong[:_SHOWN] + more)


def assert_results_equal(expected: TrainResult, found: TrainResult) -> None:
    """Fails unless two fits agree bit for bit."""
    assert_results_close(expected, found, rtol=0.0)


def as_float64(module_factory: Callable[[], L.LightningModule]) -> Callable[[], L.LightningModule]:
    """The factory, with a module in float64; goes with batches of :func:`double_batches`."""
    return lambda: module_factory().double()


def double_batches(batches: list[Any]) -> list[Any]:
    """The batches, with floating-point tensors in float64."""
    return tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batches)


_REFERENCES: dict[tuple[str, torch.dtype], TrainResult] = {}


def reference(case: Case, dtype: torch.dtype = torch.float32) -> TrainResult:
    """The plain fit of a case; computed once, as every test that compares with it needs the same one."""
    key = (case.name, dtype)
    if key not in _REFERENCES:
        _REFERENCES[key] = train(*_inputs(case, dtype))
    return _REFERENCES[key]


def _inputs(case: Case, dtype: torch.dtype) -> tuple[Callable[[], L.LightningModule], list[Any]]:
    if dtype is torch.float64:
        return as_float64(case.module), double_batches(case.batches())
    return case.module, case.batches()


def assert_equivalent(
    case: Case,
    devices: int,
    num_microbatches: int,
    dtype: torch.dtype = torch.float32,
    rtol: float | None = None,
    during: Callable[[L.Trainer], contextlib.AbstractContextManager[Any]] | None = None,
    **strategy_options: Any,
) -> None:
    """Fits a case plainly and with the strategy, and fails if anything differs by more than ``rtol``.

    Args:
        rtol: 1e-5 for float32 and 1e-10 for float64 if not given.
        during: see :func:`train`; for the run under test only.
        **strategy_options: for ``RoundPipeStrategy``.
    """
    if rtol is None:
        rtol = 1e-10 if dtype is torch.float64 else 1e-5
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches, **strategy_options)
    found = train(*_inputs(case, dtype), strategy, devices, during=during)
    assert_results_close(reference(case, dtype), found, rtol)


def in_microbatches(module_factory: Callable[[], L.LightningModule], num_microbatches: int) -> Callable[[], Any]:
    """The factory, with a ``training_step`` that runs equal micro-batches one after another and averages their losses.

    The plain reference for modules whose result depends on the split, such as those with batch normalisation.
    """

    def build() -> L.LightningModule:
        module = module_factory()

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            parts: list[Any] = []
            for number in range(num_microbatches):

                def take(tensor: Tensor, number: int = number) -> Tensor:
                    return tensor.chunk(num_microbatches)[number]

                parts.append(tree_map_only(Tensor, take, batch))
            loss = torch.stack([module.loss(part) for part in parts]).mean()  # type: ignore[operator]
            module.log("loss", loss)
            return loss

        module.training_step = training_step  # type: ignore[method-assign]
        return module

    return build
