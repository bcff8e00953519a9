"""Fused CPU kernels for optimizers that offer them: one pass over memory for what takes ten as single operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FusedKernels"]

_DEFAULT = ("foreach", "differentiable", "capturable")
_DTYPES = (torch.float32, torch.float64)
"""With half precision weights torch's fused SGD leaves all full vectors of the CPU as they are (torch 2.13)."""


class FusedKernels:
    """Switches ``fused`` on where the user said nothing, and hides that from checkpoints.

    PyTorch chooses its fused kernels by itself only on GPUs; the weights here are on the host. They round differently
    in the last bits.
    """

    def __init__(self) -> None:
        self._chosen: set[int] = set()

    def choose(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let ``optimizers`` of torch use fused kernels, group by group, where these can do what the group needs.

        Args:
            module: what is trained; fused kernels know no sparse gradients.
            optimizers: any optimizers.
        """
        if any(getattr(inner, "sparse", False) for inner in module.modules()):
            return
        for optimizer in optimizers:
            if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.Adagrad):
                continue  # Adagrad makes its state for the kernel that it will use when it is built.
            for group in optimizer.param_groups:
                if (
                    "fused" in group
                    and group["fused"] is None
                    and not any(group.get(name) for name in _DEFAULT)
                    and group.get("foreach") is None
                    and not isinstance(group.get("lr"), Tensor)
                    # The kernel of SGD fails on parameters that get their first gradient later than others.
                    and not (isinstance(optimizer, torch.optim.SGD) and group["momentum"])
                    and all(p.dtype in _DTYPES and p.layout is torch.strided for p in group["params"])
                ):
                    group["fused"] = True
                    self._chosen.add(id(optimizer))

    def hide(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The state of ``optimizer`` as if nothing had been chosen: it may go on where there are no such kernels."""
        if id(optimizer) not in self._chosen:
            return state
        groups = [{**group, "fused": None} if group.get("fused") else group for group in state["param_groups"]]
        return {**state, "param_groups": groups}
