"""What is updated when, in the background."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.runtime import updater as updater_module
from lightning_roundpipe.runtime.host_store import HostStore, UsePlace
from lightning_roundpipe.runtime.partial_step import PartialStepper
from lightning_roundpipe.runtime.updater import Updater, UpdateRequest


class Download:
    """Stands for the event of a download."""

    def __init__(self, *, arrived: bool) -> None:
        self.arrived = threading.Event()
        if arrived:
            self.arrived.set()

    def query(self) -> bool:
        return self.arrived.is_set()

    def synchronize(self) -> None:
        assert self.arrived.wait(10)


class Noted(torch.optim.SGD):
    """Notes which parameters it steps together; when it has stepped once, everything has arrived."""

    def __init__(self, parameters: Any, downloads: list[Download]) -> None:
        super().__init__(parameters, lr=0.0)
        self.steps: list[list[int]] = []
        self.downloads = downloads

    def step(self, closure: Any = None) -> Any:
        self.steps.append([int(p.detach()) for group in self.param_groups for p in group["params"]])
        for download in self.downloads:
            download.arrived.set()
        return super().step(closure)


def steps(arrived: list[bool]) -> list[list[int]]:
    """What is updated together, of parameters that are needed in their order and come in the reverse of it."""
    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(len(arrived))]
    downloads = [Download(arrived=there) for there in arrived]
    optimizer = Noted(parameters, downloads)
    store = HostStore(None, pin=False, warn=print)
    needed = {id(parameter): number for number, parameter in enumerate(parameters)}
    updater = Updater(
        UpdateRequest(PartialStepper(optimizer), 1.0, fresh=True), store, store.take_gradient, None, needed
    )
    for number in reversed(range(len(arrived))):
        store.land(parameters[number], UsePlace(0, 0, 0), torch.ones(()), downloads[number])  # type: ignore[arg-type]
        updater.submit(parameters[number])
        updater.submit(parameters[number])  # Two workers may notice at once.
    updater.start()
    updater.finish()
    assert len(updater.updated) == len(parameters)
    return optimizer.steps


def test_what_is_needed_first_is_updated_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps([True] * 4) == [[0, 1, 2, 3]]
    monkeypatch.setattr(updater_module, "_BATCH_ELEMENTS", 2)
    assert steps([True] * 4) == [[0, 1], [2, 3]]


def test_what_has_not_arrived_keeps_nothing_waiting() -> None:
    assert steps([False, True, True, True]) == [[1, 2, 3], [0]]


def test_where_nothing_has_arrived_the_oldest_is_waited_for() -> None:
    class Soon(Download):
        def synchronize(self) -> None:
            self.arrived.set()

    parameters = [nn.Parameter(torch.tensor(float(number))) for number in range(3)]
    optimizer = Noted(parameters, [])
    store = HostStore(None, pin=False, warn=print)
    updater = Updater(UpdateRequest(PartialStepper(optimizer), 1.0, fresh=True), store, store.take_gradient, None, {})
    for number in (2, 1, 0):
        store.land(parameters[number], UsePlace(0, 0, 0), torch.ones(()), Soon(arrived=False))  # type: ignore[arg-type]
        updater.submit(parameters[number])
    updater.start()
    updater.finish()
    assert optimizer.steps == [[2], [1], [0]]
