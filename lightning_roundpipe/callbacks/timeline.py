"""Writes what happened in chosen steps: a trace for a viewer, and a picture beside what was predicted."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_only

from lightning_roundpipe.callbacks.step_monitor import StepMonitor
from lightning_roundpipe.plan.trace import chrome_trace

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["TimelineWriter"]


class TimelineWriter(StepMonitor):
    """Writes ``step_<n>.json``, and with ``picture`` ``step_<n>.<format>``, for chosen training steps.

    The JSON is in Chrome's trace format (open it in Perfetto or ``chrome://tracing``): a process for each worker, with
    a row for tickets, one for uploads and one for downloads. The picture shows the measured step above the one that the
    simulator predicts from measured costs of calls, where there are any.

    Args:
        dirpath: the folder; by default ``timelines`` below the Trainer's default root.
        steps: values of ``trainer.global_step`` after the step; by default 5, when times have settled.
        picture: ``"png"`` or ``"svg"``, which need matplotlib, or None.

    Raises:
        ValueError: ``picture`` is another format.
    """

    def __init__(
        self, dirpath: str | Path | None = None, steps: Collection[int] = (5,), picture: str | None = None
    ) -> None:
        super().__init__()
        if picture not in (None, "png", "svg"):
            raise ValueError(f"`picture` must be 'png', 'svg' or None, but got {picture!r}.")
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._steps = frozenset(steps)
        self._picture = picture

    @rank_zero_only
    def on_step(self, trainer: "Trainer", pl_module: "LightningModule", stats: "StepStats", batch: Any) -> None:
        """Write the step, if it is one of the chosen."""
        if trainer.global_step not in self._steps:
            return
        folder = self._dirpath or Path(trainer.default_root_dir) / "timelines"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{trainer.global_step}"
        timeline, plan = stats.timeline, stats.schedule.plan
        path.with_suffix(".json").write_text(json.dumps(chrome_trace(timeline, plan)), encoding="utf-8")
        if self._picture is not None:
            from lightning_roundpipe.plan.picture import draw_timelines

            strategy: Any = trainer.strategy
            timelines = {"measured": timeline}
            if (predicted := strategy.predicted_timeline()) is not None:
                timelines["predicted"] = predicted
            draw_timelines(timelines, plan, path.with_suffix(f".{self._picture}"))
