"""Threads live on between steps, and end with the pool."""

import gc
import threading
import time

from lightning_roundpipe.runtime.threads import ThreadPool


def _named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_a_number_is_always_the_same_thread() -> None:
    pool = ThreadPool("pool-a")
    seen: list[tuple[int, int]] = []
    done = threading.Semaphore(0)
    for number in (0, 1, 0, 1):

        def job(number: int = number) -> None:
            seen.append((number, threading.get_ident()))
            done.release()

        pool.submit(number, job)
    for _ in range(4):
        assert done.acquire(timeout=10)
    assert len(set(seen)) == 2
    assert len({ident for _, ident in seen}) == 2
    pool.close()
    assert not _named("pool-a")


def test_close_runs_what_was_submitted_and_the_pool_can_be_used_again() -> None:
    pool = ThreadPool("pool-b")
    seen: list[int] = []
    pool.submit(0, lambda: time.sleep(0.05))
    pool.submit(0, lambda: seen.append(1))
    pool.close()
    assert seen == [1]
    pool.submit(0, lambda: seen.append(2))
    pool.close()
    assert seen == [1, 2]


def test_a_pool_that_is_dropped_ends_its_threads() -> None:
    pool = ThreadPool("pool-c")
    pool.submit(1, lambda: None)
    assert len(_named("pool-c")) == 2
    del pool
    gc.collect()
    for thread in _named("pool-c"):
        thread.join(timeout=10)
    assert not _named("pool-c")
