"""Threads that run micro-batches, step after step.

They live as long as the executor. A new thread for each step would start with cold caches: cuDNN keeps the execution
plans of attention by thread, and making one takes as long as several layers.
"""

import queue
import threading
import weakref
from collections.abc import Callable

__all__ = ["ThreadPool"]

_Inbox = queue.SimpleQueue[Callable[[], None] | None]


class ThreadPool:
    """Daemon threads by number, started when they are first needed.

    Args:
        name: prefix of the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inboxes: list[_Inbox] = []
        self._threads: list[threading.Thread] = []
        # Threads know their inbox, not the pool: one that is dropped without `close` takes them along.
        weakref.finalize(self, _end, self._inboxes)

    def submit(self, number: int, function: Callable[[], None]) -> None:
        """Run ``function``, which must not raise, in thread ``number``, after what was submitted to it before."""
        while len(self._threads) <= number:
            inbox: _Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(inbox,), name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)
        self._inboxes[number].put(function)

    def close(self) -> None:
        """End the threads when they have run what was submitted; the pool starts new ones if it is used again."""
        _end(self._inboxes)
        for thread in self._threads:
            thread.join()
        self._inboxes.clear()
        self._threads.clear()


def _end(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _work(inbox: _Inbox) -> None:
    while (function := inbox.get()) is not None:
        function()
        del function  # Or what it holds would live until the next one comes.
