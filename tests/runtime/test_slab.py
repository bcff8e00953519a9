"""Slabs of host memory: page-exact, registered in chunks, and usable where nothing can be registered."""

from unittest import mock

import pytest
import torch

from lightning_roundpipe.runtime import slab
from lightning_roundpipe.runtime.layout import ALIGNMENT
from lightning_roundpipe.runtime.slab import Slab

LIKES = [(torch.Size([3, 5]), torch.float32), (torch.Size([]), torch.bfloat16), (torch.Size([0, 4]), torch.int8)]


def never(message: str) -> None:
    raise AssertionError(message)


def test_tensors_share_the_flat_bytes() -> None:
    made = Slab(LIKES, pin=False, warn=never)
    for tensor, (shape, dtype) in zip(made.tensors, LIKES, strict=True):
        assert tensor.shape == shape and tensor.dtype is dtype
        tensor.fill_(1)
    written = [
        made.flat[offset : offset + tensor.nbytes] for offset, tensor in zip(made.offsets, made.tensors, strict=True)
    ]
    for tensor, content in zip(made.tensors, written, strict=True):
        assert torch.equal(tensor.reshape(-1), content.view(tensor.dtype))
    assert made.payload_bytes == 62 <= made.num_bytes <= 62 + 2 * ALIGNMENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_of_a_converted_copy(dtype: torch.dtype) -> None:
    """One conversion of everything converts every tensor; a write to one does not count as a write to another."""
    made = Slab([(torch.Size([3, 5]), torch.float32), (torch.Size([70]), torch.float32)], pin=False, warn=never)
    for tensor in made.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    views = made.views_of(made.flat.view(made.dtype).to(dtype))
    for tensor, view in zip(made.tensors, views, strict=True):
        assert torch.equal(tensor.to(dtype), view)
    version = views[1]._version
    views[0].zero_()
    assert views[1]._version == version
    assert torch.equal(made.tensors[1].to(dtype), views[1])


@pytest.mark.parametrize("fails_at", [0, 2])
def test_what_can_not_be_page_locked_is_pageable(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names host memory, what was registered is given back, and the next kernel does not see the error."""
    driver = mock.Mock()
    driver.cudaHostRegister.side_effect = [0] * fails_at + [2]
    driver.cudaGetErrorString.return_value = "out of memory"
    cleared = mock.Mock()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(slab, "_swallow_cuda_error", cleared)
    monkeypatch.setattr(slab, "_CHUNK_BYTES", 4096)
    told: list[str] = []
    made = Slab([(torch.Size([4096]), torch.float32)], pin=True, warn=told.append)
    assert not made.pinned
    assert driver.cudaHostUnregister.call_count == fails_at
    cleared.assert_called_once()
    assert len(told) == 1 and "Host memory could not be page-locked" in told[0]
    assert float(made.tensors[0].fill_(2.0).sum()) == 8192


def test_memory_is_registered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = mock.Mock()
    driver.cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(slab, "_CHUNK_BYTES", 4096)
    made = Slab([(torch.Size([2500]), torch.float32)], pin=True, warn=never)
    assert made.pinned
    start = made.flat.data_ptr()
    assert [call.args[:2] for call in driver.cudaHostRegister.call_args_list] == [
        (start, 4096),
        (start + 4096, 4096),
        (start + 8192, made.num_bytes - 8192),
    ]
    made.unpin()
    assert driver.cudaHostUnregister.call_count == 3 and not made.pinned
