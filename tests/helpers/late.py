"""Trains with gradients that were computed one update behind, in any strategy, by hooks alone."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

__all__ = ["Late"]


class Late(L.LightningModule):
    """Mixed into a module: the reference for ``optimizer_overlap="stale"``.

    ``ahead`` holds the masters while the parameters are those of one update before; where hooks may look, and in the
    step after the first update, none is behind.
    """

    first = True
    before: list[Tensor] | None = None
    ahead: list[Tensor] | None = None

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.before is not None and self.ahead is None:
            self.ahead = self._values()
            self._set(self.before)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            result = optimizer_closure()
            if self.ahead is not None:
                self._set(self.ahead)
                self.ahead = None
            self.before = self._values()
            return result

        optimizer.step(closure)
        if self.first and self.before is not None:
            self.first = all(map(torch.equal, self.before, self._values()))  # A loss scaler may have skipped the step.
            self.before = None

    def _catch_up(self) -> None:
        assert self.ahead is None
        self.before = None

    on_validation_start = on_validation_end = on_train_epoch_start = _catch_up
