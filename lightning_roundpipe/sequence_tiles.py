"""Runs modules that treat every position alike (MLPs) over a part of the sequence at a time.

The inner activations of an MLP are several times as wide as its input. Over tiles they exist for one tile at a time: in
a pass without a graph because the next tile takes their place, in one with a graph because each tile is run again for
its backward. Sums over positions, as gradients of weights are, are added up tile by tile, which may change last bits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.exceptions import UnsupportedUseError

__all__ = ["tiled_over_the_sequence"]


@contextmanager
def tiled_over_the_sequence(root: nn.Module, tiles: Mapping[str, int], checked: set[str]) -> Iterator[None]:
    """Let modules below ``root`` work tile by tile.

    Args:
        root: see there.
        tiles: by class name, positions in a tile. Positions are the dimension before the last.
        checked: class names of which it is known that they treat positions alike; those that are found to are added.

    Raises:
        UnsupportedUseError: there is no module of a class, or (when it is called) it does not treat positions alike.
    """
    chosen = [module for module in root.modules() if type(module).__name__ in tiles]
    if missing := tiles.keys() - {type(module).__name__ for module in chosen}:
        raise UnsupportedUseError(
            f"`sequence_tiles` must name classes of modules in {type(root).__name__}, but there is none of class"
            f" {', '.join(sorted(missing))}."
        )
    before = [(module, vars(module).get("forward")) for module in chosen]
    try:
        for module in chosen:
            vars(module)["forward"] = partial(_forward, module, module.forward, tiles[type(module).__name__], checked)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward


def _forward(
    module: nn.Module, forward: Callable[..., Tensor], tile: int, checked: set[str], x: Tensor, *rest: Any, **named: Any
) -> Tensor:
    name = type(module).__name__
    if rest or named:
        raise _refusal(name, "it takes more than one argument")
    if x.dim() < 2 or x.shape[-2] <= tile:
        return forward(x)
    if name not in checked:
        _check(module, forward, x)
        checked.add(name)
    if not torch.is_grad_enabled():
        return torch.cat([forward(part) for part in x.split(tile, -2)], -2)
    parts = [
        checkpoint(forward, part, use_reentrant=False, preserve_rng_state=False) for part in x.split(tile, -2)
    ]  # Random numbers are not drawn: see `_check`.
    return torch.cat(parts, -2)


def _check(module: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> None:
    name = type(module).__name__
    if any(isinstance(inner, (nn.Dropout, nn.AlphaDropout)) and inner.p > 0 for inner in module.modules()):
        raise _refusal(name, "it has dropout, and tiles would draw other random numbers")
    with torch.no_grad():
        both, first, second = forward(x[..., :2, :]), forward(x[..., :1, :]), forward(x[..., 1:2, :])
    if not isinstance(both, Tensor) or both.shape[:-1] != x[..., :2, :].shape[:-1]:
        raise _refusal(name, "it does not return one tensor with a row for each position")
    apart = torch.cat([first, second], -2)
    scale = both.abs().max().clamp(min=torch.finfo(both.dtype).tiny)
    # Other shapes take other kernels: what differs by more than rounding depends on the neighbour.
    if bool((both - apart).abs().max() > 16 * torch.finfo(both.dtype).eps ** 0.75 * scale):
        raise _refusal(name, "what it returns for a position depends on other positions")


def _refusal(name: str, reason: str) -> UnsupportedUseError:
    return UnsupportedUseError(
        f"`sequence_tiles` is for modules that treat every position alike, such as MLPs, but not for {name}: {reason}."
        " Leave it out."
    )
