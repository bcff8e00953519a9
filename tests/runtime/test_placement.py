"""Where weights lie in host memory: in files, in ordinary memory, or page-locked by a driver that is played here."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.in_place import InPlace
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.placement import HOST_WEIGHTS, WeightPlacement
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.units import find_units, tensor_bytes
from lightning_roundpipe.runtime.weight_files import TensorSpec, WeightFiles, write_weights
from lightning_roundpipe.runtime.worker import Worker

WIDTH = 256


class Driver:
    """Page-locks memory, up to a limit, and keeps account."""

    def __init__(self) -> None:
        self.limit_bytes = float("inf")
        self.registered: dict[int, int] = {}
        self.refused = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.registered.values())

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        if self.num_bytes + size > self.limit_bytes:
            self.refused += 1
            return 2
        assert start % mmap.PAGESIZE == 0
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.registered[start]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return "out of memory"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr("lightning_roundpipe.runtime.slab._swallow_cuda_error", lambda: None)
    return driver


class Frozen(nn.Module):
    """Four frozen layers, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)


def in_files(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Put all weights of ``module`` into files; returns their values."""
    values = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    write_weights(folder, {n: TensorSpec(t.dtype, t.shape) for n, t in values.items()}, values.items(), 10**6)
    stored = WeightFiles(folder)
    for name, parameter in module.named_parameters():
        parameter.data = stored[name].map()
    return values


def adopted(
    module: nn.Module,
    pin: bool,
    warn: Callable[[str], None] = print,
    compute_dtype: torch.dtype | None = None,
    **placement: Any,
) -> HostStore:
    store = HostStore(compute_dtype, pin=pin, warn=warn, placement=WeightPlacement(**placement))
    store.adopt(module, find_units(module))
    return store


def bytes_of(module: nn.Module) -> int:
    return sum(map(tensor_bytes, module.parameters()))


def uploaded(store: HostStore, parameter: Tensor) -> Tensor:
    """What a GPU would compute with for ``parameter``."""
    home = store.slab(parameter)
    flat = torch.zeros(home.slab.num_elements, dtype=store.dtype_of(parameter))
    for begin, piece in home.slab.pieces():
        flat[begin : begin + len(piece)] = piece
    return dict(zip(map(id, home.parameters), home.slab.views_of(flat), strict=True))[id(parameter)]


# ------------------------------------------------------------------------------------------------------------ mappings


def test_file_backed_memory_is_told_from_other_memory(tmp_path: Path) -> None:
    module = Frozen()
    in_files(module, tmp_path)
    anonymous, shared = torch.zeros(10_000), Slab([(torch.Size([9]), torch.float32)], pin=False, warn=print).tensors[0]
    files = FileMappings()
    assert all(parameter in files for parameter in module.parameters())
    assert anonymous not in files
    assert shared not in files
    assert torch.ones(4).share_memory_() not in files
    assert torch.empty(3, device="meta") not in files


def test_the_bytes_that_are_read_ahead_are_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Frozen()
    values = in_files(module, tmp_path)
    files = FileMappings()
    read: list[bytes] = []

    def advise(file: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        read.append(os.pread(file, length, offset))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    for name, parameter in module.named_parameters():
        files.read_ahead(parameter)
        assert b"".join(read) == values[name].numpy().tobytes()
        assert max(map(len, read)) <= 2**17
        read.clear()
    files.read_ahead(torch.ones(4))
    assert not read
    files.close()
    monkeypatch.undo()
    adopted(module, pin=False).read_ahead(module.parameters())


def test_files_that_were_replaced_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Frozen()
    in_files(module, tmp_path)
    in_files(Frozen(), tmp_path)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: pytest.fail("Those are other bytes."))
    files = FileMappings()
    assert module.head.weight in files
    files.read_ahead(module.head.weight)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    files.read_ahead(module.head.weight)
    files.close()


# ------------------------------------------------------------------------------------------- without and with a driver


@pytest.mark.parametrize("kind", HOST_WEIGHTS)
def test_virtual_workers_leave_frozen_weights_in_files_unless_told(tmp_path: Path, kind: str) -> None:
    module = Frozen()
    values = in_files(module, tmp_path)
    store = adopted(module, pin=False, kind=kind)
    files = FileMappings()
    stays = kind in ("auto", "mmap")
    assert all((parameter in files) == stays for parameter in module.layers.parameters())
    assert all(parameter not in files for parameter in module.head.parameters())
    assert store.mapped_bytes == (bytes_of(module.layers) if stays else 0)
    assert all(torch.equal(parameter, values[name]) for name, parameter in module.named_parameters())


def test_virtual_workers_compute_with_what_lies_in_files(tmp_path: Path) -> None:
    module = Frozen()
    in_files(module, tmp_path)
    frozen, trained = module.layers[0].weight, module.head.weight
    worker = Worker(0, torch.device("cpu"), adopted(module, pin=False, kind="mmap"))
    worker.enter(0, [frozen, trained], [module.layers[1].weight], comes_again=False)
    assert worker.weight(frozen).data_ptr() == frozen.data_ptr()
    assert worker.weight(trained).data_ptr() != trained.data_ptr()
    assert sum(num_bytes for *_, num_bytes in worker.transfers) == tensor_bytes(trained)
    half = Worker(0, torch.device("cpu"), adopted(module, pin=False, compute_dtype=torch.bfloat16, kind="mmap"))
    assert torch.equal(half.weight(frozen), frozen.bfloat16())


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", HOST_WEIGHTS)
def test_what_is_pinned(tmp_path: Path, driver: Driver, kind: str, mapped: bool) -> None:
    module = Frozen()
    values = in_files(module, tmp_path) if mapped else {n: p.detach().clone() for n, p in module.named_parameters()}
    store = adopted(module, pin=True, kind=kind)
    frozen, trained = bytes_of(module.layers), bytes_of(module.head)
    payload = {"pinned": frozen + trained, "auto": frozen + trained, "pageable": 0}.get(
        kind, trained if mapped else frozen + trained
    )
    assert payload <= driver.num_bytes <= 1.05 * payload
    assert driver.num_bytes == store.pinned_bytes
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, values[name]), name
        assert torch.equal(uploaded(store, parameter), values[name]), name
    assert store.mapped_bytes == (frozen if mapped and kind == "mmap" else 0)
    landings = [store.landing(parameter, 0, overwrite_grad=False) for parameter in module.head.parameters()]
    payload += sum(map(tensor_bytes, landings))
    assert payload <= driver.num_bytes <= 1.05 * payload
    store.close()
    assert not driver.registered


def test_auto_pins_what_trains_and_then_what_there_is_room_for(tmp_path: Path, driver: Driver) -> None:
    module = Frozen()
    values = in_files(module, tmp_path)
    layer = bytes_of(module.layers[0])
    store = adopted(module, pin=True, kind="auto", room_bytes=2.5 * layer)
    assert all(store.slab(parameter).slab.pinned for parameter in module.head.parameters())
    assert [store.slab(layer.weight).slab.pinned for layer in module.layers] == [True, True, False, False]
    assert store.mapped_bytes == 2 * layer
    for name, parameter in module.named_parameters():
        assert torch.equal(uploaded(store, parameter), values[name]), name


@pytest.mark.parametrize("kind", HOST_WEIGHTS)
def test_half_precision_crosses_the_link_where_the_host_converts(tmp_path: Path, driver: Driver, kind: str) -> None:
    """Frozen weights always; trained ones are updated too often, unless they are staged anyway."""
    module = Frozen()
    values = in_files(module, tmp_path)
    store = adopted(module, pin=True, compute_dtype=torch.bfloat16, kind=kind)
    for name, parameter in module.named_parameters():
        assert torch.equal(uploaded(store, parameter), values[name].bfloat16())
        full = parameter.requires_grad and kind != "pageable"
        assert store.uploaded_bytes(parameter) == parameter.numel() * (4 if full else 2)
    assert store.mapped_bytes == (bytes_of(module.layers) if kind in ("mmap", "pinned", "auto") else 0)


def test_weights_that_stay_in_place_are_read_where_they_are_now(driver: Driver) -> None:
    module = Frozen()
    store = adopted(module, pin=True, kind="pageable")
    weight = module.layers[0].weight
    store.refresh(everything=False)
    version = store.slab(weight).version
    weight.data = weight.data.clone()
    store.refresh(everything=False)
    assert store.slab(weight).version > version
    weight.data.fill_(3.0)
    version = store.slab(weight).version
    store.refresh(everything=False)
    assert store.slab(weight).version > version
    assert torch.equal(uploaded(store, weight), weight)


@pytest.mark.parametrize("through_data", [True, False])
def test_a_write_to_a_mapped_weight_is_noticed(tmp_path: Path, driver: Driver, through_data: bool) -> None:
    module = Frozen()
    in_files(module, tmp_path)
    store = adopted(module, pin=True, kind="mmap")
    store.refresh(everything=False)
    weight = module.layers[1].weight
    version = store.slab(weight).version
    store.refresh(everything=False)
    assert store.slab(weight).version == version
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(2)
    store.refresh(everything=False)
    assert store.slab(weight).version == version + 1
    assert torch.equal(uploaded(store, weight), weight)


def test_a_failed_pin_falls_back_with_one_warning(driver: Driver) -> None:
    module = Frozen()
    driver.limit_bytes = 1.5 * bytes_of(module.layers[0])
    values = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    told: list[str] = []
    store = adopted(module, pin=True, warn=told.append, kind="pinned")
    store.landing(module.head.weight, 0, overwrite_grad=False)
    assert len(told) == 1
    assert "out of memory" in told[0]
    assert driver.refused == 1  # Nobody asks again.
    assert 0 < store.pinned_bytes <= driver.limit_bytes
    assert store.slab(module.head.weight).slab.pinned  # What trains comes first.
    for name, parameter in module.named_parameters():
        assert torch.equal(uploaded(store, parameter), values[name]), name
    store.close()
    assert not driver.registered


def test_a_second_store_takes_over(tmp_path: Path, driver: Driver) -> None:
    """As a second fit does, with other wishes."""
    module = Frozen()
    values = in_files(module, tmp_path)
    for kind in ("mmap", "pageable", "pinned", "auto"):
        store = adopted(module, pin=True, kind=kind)
        for name, parameter in module.named_parameters():
            assert torch.equal(uploaded(store, parameter), values[name]), name
        store.close()
    assert not driver.registered


def test_tensors_in_place_follow_the_layout_of_a_slab() -> None:
    masters = [torch.arange(3.0), torch.empty(0), torch.arange(200.0).view(100, 2).t()]
    source = InPlace(masters)
    slab = Slab(source.likes, pin=False, warn=print)
    assert (source.offsets, source.num_bytes) == (slab.offsets, slab.num_bytes)
    flat = torch.zeros(source.num_elements)
    for begin, piece in source.pieces():
        flat[begin : begin + len(piece)] = piece
    for master, copy in zip(masters, source.views_of(flat), strict=True):
        assert torch.equal(master, copy)
