"""Settings of a model that do not go with recomputation, switched off while a training step runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["switched_off", "uncompiled"]


@contextmanager
def switched_off(root: nn.Module, warn: Callable[[str], None]) -> Iterator[None]:
    """Switch key/value caching and the model's own checkpointing off below ``root``, and back on afterwards.

    A cache (``config.use_cache``) is changed by the forward pass, so recomputation would see it twice. Checkpointing
    (``module.gradient_checkpointing``) recomputes in PyTorch's own backward threads, on top of ours.
    """
    changed: list[tuple[Any, str]] = []
    for module in root.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            changed.append((config, "use_cache"))
        if vars(module).get("gradient_checkpointing") is True:
            changed.append((module, "gradient_checkpointing"))
    if any(name == "use_cache" for _, name in changed):
        warn(
            "The model's key/value cache (`config.use_cache`) is off in training steps: a cache is of no use there, and"
            " recomputation would see it twice. Set `use_cache=False` in the config to silence this."
        )
    if any(name == "gradient_checkpointing" for _, name in changed):
        warn(
            "The model's own gradient checkpointing is off in training steps: RoundPipeStrategy recomputes what it must"
            " itself. Do not call `gradient_checkpointing_enable()` to silence this."
        )
    try:
        for owner, name in changed:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


@contextmanager
def uncompiled(root: nn.Module, warn: Callable[[str], None]) -> Iterator[None]:
    """Let compiled modules below ``root`` run eagerly: the compiler can not see through the lookup of parameters."""
    undo: list[tuple[nn.Module, str, Any]] = []
    for module in root.modules():
        if vars(module).get("_compiled_call_impl") is not None:
            undo.append((module, "_compiled_call_impl", None))
        elif type(module).__name__ == "OptimizedModule":  # Not by class: importing the compiler takes seconds.
            undo.append((module, "forward", module._orig_mod))
    if undo:
        warn(
            "Compiled modules run eagerly under RoundPipeStrategy: weights that are looked up can not be compiled. Use"
            " `RoundPipeStrategy(compile_units=True)`."
        )
    originals = [(module, name, vars(module)[name]) for module, name, _ in undo]
    try:
        for module, name, value in undo:
            vars(module)[name] = value
        yield
    finally:
        for module, name, value in originals:
            vars(module)[name] = value
