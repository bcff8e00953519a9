"""Tells once in a fit what runs and what it takes, and, when a step has been measured, what limits it."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.timeline import Lane
from lightning_roundpipe.runtime.executor import Executor
from lightning_roundpipe.runtime.stats import StepStats
from lightning_roundpipe.runtime.units import tensor_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["FirstStepSummary", "executor_rows", "limit_rows", "schedule_rows", "update_text"]

Rows = list[tuple[str, str]]
"""What it is, and its value, in the order in which they are shown."""

_BUSY = 0.5
"""What is in use for a smaller share of a step does not limit it. A guess."""

_MOST_CLASSES = 3


class FirstStepSummary(Callback):
    """Shows a table after the first training step of a fit, and a second one after the first step that was measured.

    The first step learns the order of calls, for which a micro-batch runs alone: its times say little. The strategy
    adds this callback where the Trainer has a model summary.
    """

    def __init__(self) -> None:
        self._told_what_runs = self._told_limit = False

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show what is known by now, and has not been shown."""
        strategy: Any = trainer.strategy
        if not self._told_what_runs:
            self._told_what_runs = True
            _show("RoundPipe: what runs", strategy.summary_rows())
        stats: StepStats | None = strategy.step_stats if pl_module.automatic_optimization else None
        if not self._told_limit and stats is not None and stats.schedule.plan.trains and not stats.probed:
            self._told_limit = True
            _show("RoundPipe: what limits the step", limit_rows(stats))


def schedule_rows(schedule: Schedule | None) -> Rows:
    """Stages, replica groups, micro-batches and recomputation.

    Args:
        schedule: of the training steps; None with manual optimization, which has none.
    """
    if schedule is None:
        return [
            ("stages", "none: with manual optimization one worker runs a step, on the whole batch"),
            ("recomputed", "every call whose backward is asked for"),
        ]
    plan = schedule.plan
    fused = plan.fused or 0
    stages = f"{plan.num_stages}: {len(plan.forward)} forward, 1 fused, {len(plan.backward)} backward (calls: {plan})"
    return [
        ("stages", stages),
        ("replica groups", f"{schedule.replica_groups} of {_counted(schedule.group_size, 'worker')}"),
        ("micro-batches", str(schedule.num_microbatches)),
        (
            "recomputed",
            f"{plan.num_calls - fused} of {_counted(plan.num_calls, 'call')}; the others ({fused}) keep their graph",
        ),
    ]


def executor_rows(executor: Executor, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Rows:
    """Units, workers and memory, as they are now.

    Args:
        executor: what runs the steps.
        module: the model.
        optimizers: those of the fit; no update may be under way.
    """
    classes = Counter(type(unit.module).__name__ for unit in executor.units).most_common()
    kinds = [f"{count} {name}" for name, count in classes[:_MOST_CLASSES]]
    if len(classes) > _MOST_CLASSES:
        kinds.append(f"{sum(count for _, count in classes[_MOST_CLASSES:])} others")
    devices = Counter(map(str, executor.devices))
    store = executor.store
    weights, state = _stored_bytes(module.parameters()), _stored_bytes(_state_tensors(optimizers))
    apart = [p.grad for p in module.parameters() if p.grad is not None and not store.owns(p.grad)]
    gradients = store.landing_bytes + _stored_bytes(apart)
    copies = f" (and {_size(store.copy_bytes)} of copies to compute with)" if store.copy_bytes else ""
    return [
        ("units", f"{len(executor.units)}: {', '.join(kinds)}"),
        ("workers", ", ".join(f"{count} on {device}" for device, count in devices.items())),
        ("host: weights", _size(weights) + copies),
        ("host: gradients", _size(gradients)),
        ("host: optimizer state", _size(state) if state else "none yet"),
        ("host: pinned of these", _size(store.pinned_bytes)),
        ("GPU memory, peak", _gpu_peaks(executor.devices)),
    ]


def update_text(mode: str, against_along: str | None, against_reaching: str | None) -> str:
    """How weights are updated, and why not otherwise.

    Args:
        mode: ``optimizer_overlap``.
        against_along: why no weight is updated before the backward pass has ended; None if it may be.
        against_reaching: why all are updated before the next step begins; None if they need not be.
    """
    if mode == "off":
        return "after the backward pass (optimizer_overlap='off')"
    if against_along is None:
        along = "each weight when its gradient is complete"
    else:
        along = f"after the backward pass, because {against_along}"
    if against_reaching is not None:
        return f"{along}; done before the next step, because {against_reaching}"
    later = "one step late" if mode == "stale" else "the rest while the next step begins"
    return f"{along}; {later} (optimizer_overlap={mode!r})"


def limit_rows(stats: StepStats) -> Rows:
    """For how long a step used what it needs, and which of these was in use for most of it.

    Args:
        stats: a training step that learned nothing.
    """
    step_s = stats.stop_s - stats.start_s
    used = {
        "compute": max(stats.busy_s, default=0.0),
        "uploads": max(stats.link_busy_s(Lane.H2D), default=0.0),
        "downloads": max(stats.link_busy_s(Lane.D2H), default=0.0),
        "update": stats.update_s,
    }
    rows = [(name, f"{1e3 * used_s:.1f} ms, {used_s / step_s:.0%} of the step") for name, used_s in used.items()]
    if stats.update_s:
        rows[-1] = ("update", f"{rows[-1][1]}; waited for: {1e3 * stats.update_exposed_s:.1f} ms")
    else:
        rows[-1] = ("update", "after the step, or none: not counted")
    most = max(used, key=lambda name: used[name])
    limit = most if used[most] >= _BUSY * step_s else "waiting: nothing is in use for half of the step"
    bubble = f"{stats.bubble_ratio:.1%} of the workers' time" if stats.spans else "no calls of units"
    return [("step", f"{1e3 * step_s:.1f} ms"), *rows, ("idle", bubble), ("limit", limit)]


def _show(title: str, rows: Rows) -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_table(title, rows)
    else:
        width = max(len(name) for name, _ in rows)
        rank_zero_info("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]))


@rank_zero_only
def _print_table(title: str, rows: Rows) -> None:
    # Here, because rich is an extra.
    import rich
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # As `Text`, so that brackets are not taken for markup.
    rich.get_console().print(table)  # The console of Lightning's `RichProgressBar`, which goes on below.


def _stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors in host memory, each once."""
    return sum(tensor_bytes(tensor) for tensor in {id(t): t for t in tensors}.values())


def _state_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    states = [dict(state) for optimizer in optimizers for state in optimizer.state.values()]
    return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]


def _gpu_peaks(devices: Sequence[torch.device]) -> str:
    """Most that has been allocated on the GPU of every worker."""
    if all(device.type != "cuda" for device in devices):
        return "n/a (virtual workers on the CPU)"
    peaks = (f"worker {i}: {_size(torch.cuda.max_memory_allocated(device))}" for i, device in enumerate(devices))
    return ", ".join(peaks)


def _size(num_bytes: float) -> str:
    """Bytes with a binary unit, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
