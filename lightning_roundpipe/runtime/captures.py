"""Outputs that transformers captures inside a unit, by hooks, into a collector that user code set up outside.

``output_hidden_states``, ``output_router_logits`` and the like work that way. A captured tensor leaves the unit by
another door than its result, so it is treated as one more output: it gets its place in the backward of the call.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Captures"]


def _active_collector() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


@dataclass(eq=False)
class Captures:
    """The collector that is active around a call, and what the call adds to it.

    Attributes:
        outer: what user code set up; None if nothing is captured.
        lengths: for each list in it, how much it held before the call: hooks look at that.
        new: for each list, what the call added.
    """

    outer: dict[str, Any] | None = None
    lengths: dict[str, int] = field(default_factory=dict)
    new: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def begin(cls) -> "Captures":
        """Look at what is active in the calling thread."""
        collector = _active_collector()
        outer = collector.get() if collector is not None else None
        if not isinstance(outer, dict):
            return cls()
        return cls(outer, {key: len(value) for key, value in outer.items() if isinstance(value, list)})

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect in `new` what the call captures, instead of in ``outer``."""
        if self.outer is None:
            yield
            return
        collector = _active_collector()
        inner = {**self.outer, **{key: [None] * length for key, length in self.lengths.items()}}
        token = collector.set(inner)
        try:
            yield
        finally:
            collector.reset(token)
        self.new = {key: inner[key][length:] for key, length in self.lengths.items()}

    def pass_on(self, new: dict[str, list[Any]]) -> None:
        """Give captured values to the outer collector."""
        if self.outer is not None:
            for key, values in new.items():
                self.outer[key].extend(values)
