"""Frozen weights cost their own bytes and nothing else: no gradient, no second copy, no moment, no download."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.host_store import HostStore
from lightning_roundpipe.runtime.slab import Slab
from lightning_roundpipe.runtime.units import find_units, tensor_bytes
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.equivalence import train
from tests.helpers.models import CASES, llama_lora, seeded, token_batches

pytest.importorskip("peft")


def sizes(module: torch.nn.Module, *, trainable: bool) -> int:
    return sum(tensor_bytes(p) for p in module.parameters() if p.requires_grad is trainable)


def test_gradients_of_adapters_alone_come_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step lands the bytes of what trains, once; nothing is even summed up for what does not."""
    landed: list[Tensor] = []
    summed: list[Tensor] = []

    def watch(owner: type, name: str, seen: list[Tensor]) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(self: Any, parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(parameter)
            return original(self, parameter, *args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(HostStore, "land", landed)
    watch(Worker, "accumulate", summed)
    found = train(CASES["llama_lora"].module, token_batches(num=3), RoundPipeStrategy(num_microbatches=3), devices=2)
    assert all(parameter.requires_grad for parameter in summed)
    assert sum(map(tensor_bytes, landed)) == 3 * sizes(found.module, trainable=True)
    assert all(p.grad is None for p in found.module.parameters() if not p.requires_grad)
    moments = [key for key in found.optimizer if key.endswith("exp_avg")]
    assert len(moments) == sum(p.requires_grad for p in found.module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_one_copy_in_the_host_store(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where GPUs read, frozen weights move into the slabs: the master is what is uploaded, at most 5 % larger."""
    module = seeded(llama_lora)
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.data = parameter.data.to(dtype)
    before = [parameter.detach().clone() for parameter in frozen]
    monkeypatch.setattr(Slab, "_register", lambda slab, num_bytes, warn: True)  # There is no driver to register with.
    store = HostStore(torch.bfloat16 if dtype is torch.bfloat16 else None, pin=True, warn=lambda message: None)
    store.adopt(module, find_units(module))
    homes = {id(store.slab(parameter)): store.slab(parameter) for parameter in frozen}
    assert not any(list(home.copies) for home in homes.values())
    assert not any(parameter.requires_grad for home in homes.values() for parameter in home.parameters)
    for parameter, values in zip(frozen, before, strict=True):
        assert torch.equal(parameter, values)


def test_slabs_of_large_weights_are_hardly_larger_than_these() -> None:
    likes = [(torch.Size([1000, 999]), torch.bfloat16), (torch.Size([7]), torch.float32)] * 4
    payload = sum(shape.numel() * dtype.itemsize for shape, dtype in likes)
    slab = Slab(likes, pin=False, warn=lambda message: None)
    assert payload <= slab.num_bytes <= 1.05 * payload
