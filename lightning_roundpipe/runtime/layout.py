"""How tensors lie one after another in flat memory: in a slab on the host, and in a worker's copy of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "Layout"]

ALIGNMENT = 256
"""Bytes to which tensors are aligned: what a GPU's widest loads and copies like. A multiple of every element size."""


class Layout:
    """Places of tensors in flat memory.

    Args:
        likes: shape and dtype of every tensor.

    Attributes:
        likes: see above.
        offsets: of the tensors, in bytes.
        num_bytes: of all, padding included.
    """

    def __init__(self, likes: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.likes = list(likes)
        self.offsets: list[int] = []
        self.num_bytes = 0
        for shape, dtype in self.likes:
            self.offsets.append(self.num_bytes)
            self.num_bytes += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.likes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors, if they have one and the same."""
        return self.likes[0][1]

    @property
    def num_elements(self) -> int:
        """Elements of `dtype` in all, padding included."""
        return self.num_bytes // self.dtype.itemsize

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Tensors in the memory of ``flat``, element by element where those of this layout, all of one dtype, are.

        They are not views in autograd's sense, which would share one version counter: a write to one would count as a
        write to all.
        """
        storage = flat.untyped_storage()
        return [
            torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, offset // self.dtype.itemsize, shape)  # type: ignore[call-overload]
            for offset, (shape, _) in zip(self.offsets, self.likes, strict=True)
        ]
