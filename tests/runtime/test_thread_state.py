"""A new thread starts with torch's defaults; under a captured state it runs as the thread that captured."""

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import pytest
import torch

from lightning_roundpipe.runtime.thread_state import Autocast, ThreadState

T = TypeVar("T")
setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="default")


def in_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def under(state: ThreadState, read: Callable[[], T]) -> T:
    """What ``read`` gives in a new thread under ``state``."""
    results: list[T] = []
    in_thread(lambda: state.run(lambda: results.append(read())))
    return results[0]


@pytest.mark.parametrize(
    "mode",
    [
        nullcontext,
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.inference_mode(False),
    ],
)
def test_grad_and_inference_mode(mode: Callable[[], AbstractContextManager[object]]) -> None:
    def read() -> tuple[bool, bool, bool]:
        product = torch.ones(1, requires_grad=True) * 2
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.requires_grad

    with mode():
        expected = read()
        state = ThreadState.capture()
    assert under(state, read) == expected


def test_grad_mode_inside_inference_mode() -> None:
    with torch.inference_mode(), torch.enable_grad():
        state = ThreadState.capture()
    assert under(state, lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled())) == (True, True)


def test_modes_end_with_the_function() -> None:
    with torch.inference_mode():
        state = ThreadState.capture()

    def body() -> bool:
        state.run(lambda: None)
        return torch.is_inference_mode_enabled()

    assert in_thread(body) is False


def test_modes_end_with_an_error() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        state = ThreadState.capture()

    def fail() -> None:
        raise KeyError("user")

    def body() -> tuple[bool, bool]:
        with pytest.raises(KeyError, match="user"):
            state.run(fail)
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    assert in_thread(body) == (True, False)


def test_what_the_function_switches_does_not_stay() -> None:
    state = ThreadState.capture()

    def body() -> bool:
        state.run(lambda: torch._C._set_grad_enabled(False))
        return torch.is_grad_enabled()

    assert in_thread(body) is True


# ------------------------------------------------------------------------------------------------------------ autocast


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        state = ThreadState.capture()
    assert in_thread(product_dtype) is torch.float32
    assert under(state, product_dtype) is dtype


def test_autocast_nested_and_disabled() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            off = ThreadState.capture()
        with torch.autocast("cpu", dtype=torch.float16):
            inner = ThreadState.capture()
        outer = ThreadState.capture()
    assert [under(state, product_dtype) for state in (off, inner, outer)] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]


def test_re_entering_disabled_settings_switches_off_what_is_on() -> None:
    """A recomputation runs under whatever its thread has entered meanwhile."""
    off = Autocast.capture()
    with torch.autocast("cpu", dtype=torch.float16):
        on = Autocast.capture()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with off.entered():
            assert product_dtype() is torch.float32
        with on.entered():
            assert product_dtype() is torch.float16
        assert product_dtype() is torch.bfloat16
    with on.entered(), off.entered():
        assert product_dtype() is torch.float32


def test_settings_are_compared_by_value() -> None:
    off = Autocast.capture()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on = Autocast.capture()
        assert Autocast.capture() == on
    assert Autocast.capture() == off != on


def test_a_cast_without_a_graph_is_not_met_again_with_one() -> None:
    """Autocast's cache would hand the weight that was cast under ``no_grad`` to the call that needs its gradient."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = Autocast.capture()
    with settings.entered():
        assert not torch.is_autocast_cache_enabled()
        with torch.no_grad():
            torch.ones(2, 2) @ weight
        (torch.ones(2, 2) @ weight).sum().backward()
    assert weight.grad is not None


# ------------------------------------------------------------------------------------------------ context and threads


def test_context_variables() -> None:
    token = setting.set("captured")
    state = ThreadState.capture()
    setting.reset(token)
    assert in_thread(setting.get) == "default"
    assert under(state, setting.get) == "captured"


def test_each_run_has_a_context_of_its_own() -> None:
    """Also: two threads can run under one state at the same time."""
    state = ThreadState.capture()
    together = threading.Barrier(2, timeout=10)
    seen: dict[str, str] = {}

    def body(name: str) -> None:
        setting.set(name)
        together.wait()
        seen[name] = setting.get()

    threads = [threading.Thread(target=state.run, args=(lambda name=name: body(name),)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"one": "one", "two": "two"}
    assert setting.get() == "default"


def test_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        state = ThreadState.capture()
        torch.set_num_threads(1)
        assert under(state, torch.get_num_threads) == 2
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
