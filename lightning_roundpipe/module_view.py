"""A view of the LightningModule for each micro-batch, so that what one stores on ``self`` no other reads.

What ``training_step`` keeps on ``self`` before the forward pass, and reads afterwards, must not be another
micro-batch's. A view is the same module (parameters, buffers, submodules and everything that was there before are
shared) with attribute assignments of its own. After the step they are carried to the module in micro-batch order: as
with one call on the whole batch, a counter goes up by one.
"""

from typing import Any

from lightning.pytorch import LightningModule

__all__ = ["ModuleViews"]

_NOT_CARRIED = ("_parameters", "_buffers", "_modules", "_device", "log")


class ModuleViews:
    """Views of ``module`` for one step.

    Attributes:
        views: by micro-batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._before: dict[int, dict[str, Any]] = {}
        self.views: dict[int, LightningModule] = {}

    def open(self, index: int) -> LightningModule:
        """Make the view of micro-batch ``index``, as the module is now."""
        view: LightningModule = object.__new__(type(self._module))
        self._before[index] = dict(vars(self._module))
        vars(view).update(self._before[index])
        self.views[index] = view
        return view

    def set_device(self, index: int, device: Any) -> None:
        """Let ``self.device`` of a micro-batch be ``device``, if its view is open."""
        if index in self.views:
            vars(self.views[index])["_device"] = device

    def carry_over(self) -> None:
        """Carry attributes that were assigned or deleted to the module."""
        for index, view in sorted(self.views.items()):
            before, now = self._before[index], vars(view)
            for name in before.keys() | now.keys():
                if name in _NOT_CARRIED or (name in before and name in now and before[name] is now[name]):
                    continue
                if name in now:
                    vars(self._module)[name] = now[name]
                else:
                    vars(self._module).pop(name, None)
