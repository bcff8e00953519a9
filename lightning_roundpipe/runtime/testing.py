"""Help for tests of code that runs on this package."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from lightning_roundpipe.runtime.executor import Executor

__all__ = ["poison_masters"]


class _HasPoison(Protocol):
    poison_masters: bool


@contextmanager
def poison_masters(strategy: _HasPoison) -> Iterator[None]:
    """Fill every host master with NaN while micro-batches run, and restore it after each step.

    If the numbers of training stay the same, nothing reads a weight but through the runtime.

    Args:
        strategy: a `RoundPipeStrategy`, before or after its Trainer has set it up.
    """
    strategy.poison_masters = True
    try:
        yield
    finally:
        strategy.poison_masters = False


def executor_of(strategy: object) -> Executor:
    """The executor of a `RoundPipeStrategy` that is set up."""
    executor = getattr(strategy, "_executor", None)
    assert isinstance(executor, Executor), "the strategy has no executor outside fit, validate, test and predict"
    return executor
