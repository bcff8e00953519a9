"""Tells quantised weights that can be streamed from those that can not.

Weights that are plain tensors, whatever their dtype (int8 or float8 with scales beside them, packed 4-bit values in
uint8), are streamed byte for byte like any other. Libraries that keep a part of a weight where no lookup of parameters
finds it are refused: a worker would compute with a part of the weight, or with one on another device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["refuse_hidden_quantisation"]

_SHOWN = 5


def refuse_hidden_quantisation(root: nn.Module) -> None:
    """Check that every weight below ``root`` is all in its tensor.

    Raises:
        ValueError: some are not; the message names them, their class and what to do.
    """
    for module in root.modules():
        method = _method(module)
        if method == "mxfp4":
            raise ValueError(
                f"{type(module).__name__} has weights in MXFP4, which its kernels keep outside of parameters, so that"
                " they can not be streamed. Load it with `quantization_config=Mxfp4Config(dequantize=True)`."
            )
    hidden = {name: parameter for name, parameter in root.named_parameters() if _hides_a_part(parameter)}
    if hidden:
        classes = sorted({f"{type(parameter).__module__}.{type(parameter).__name__}" for parameter in hidden.values()})
        names = ", ".join(f"`{name}`" for name in list(hidden)[:_SHOWN])
        more = f" and {len(hidden) - _SHOWN} more" if len(hidden) > _SHOWN else ""
        raise ValueError(
            f"Weights are streamed as plain tensors, but these are of {', '.join(classes)}, which keeps a part of the"
            f" weight elsewhere: {names}{more}. Load the model in bfloat16 (frozen weights cost nothing but their own"
            " bytes in host memory), or with a quantisation whose weights and scales are ordinary parameters and"
            " buffers."
        )


def _method(module: nn.Module) -> str | None:
    config = getattr(getattr(module, "config", None), "quantization_config", None)
    method: Any = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _hides_a_part(parameter: Tensor) -> bool:
    """Whether ``parameter`` wraps other tensors (torchao), or carries some as attributes (bitsandbytes)."""
    if is_traceable_wrapper_subclass(parameter):
        return True
    return type(parameter) is not nn.Parameter and any(True for _ in _attached(parameter))


def _attached(parameter: Tensor) -> Iterator[Tensor]:
    for value in vars(parameter).values():
        parts = [value, *getattr(value, "__dict__", {}).values()]
        yield from (part for part in parts if isinstance(part, torch.Tensor))
