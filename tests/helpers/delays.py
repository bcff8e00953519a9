"""Hostile timing: sleeps at chosen places, drawn from a seed."""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

__all__ = ["delays"]


@contextmanager
def delays(
    seed: int, places: Sequence[tuple[type, str]], most_s: float = 4e-4, probability: float = 0.15
) -> Iterator[None]:
    """Sleep now and then at the given places, and switch threads often.

    Args:
        seed: of the draws; in which order threads draw is not fixed.
        places: classes and names of their methods.
        most_s: longest sleep, in seconds.
        probability: of a sleep at each call.
    """
    draw = random.Random(seed)

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if draw.random() < probability:
                time.sleep(draw.random() * most_s)
            return function(*args, **kwargs)

        return call

    interval = sys.getswitchinterval()
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval)
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, delayed(getattr(owner, name))))
        sys.setswitchinterval(draw.choice([1e-6, 1e-5, interval]))
        yield
