"""Page-exact host memory for many tensors, pinned where a GPU copies from or to it.

Allocating pinned tensors one by one rounds each to a power of two and can nearly double host memory. A slab is one
anonymous mapping, registered with the driver in chunks; every tensor in it has a storage of its own, exactly as large
as its elements, so that saving one saves nothing else.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_roundpipe.runtime.layout import Layout

__all__ = ["Slab"]

_CHUNK_BYTES = 4 * 2**30
"""Some drivers refuse to register hundreds of GiB at once."""


class Slab(Layout):
    """Host memory for tensors of the given shapes and dtypes.

    The memory lives as long as any of its tensors; `unpin` only ends the registration.

    Args:
        likes: shape and dtype of every tensor.
        pin: whether to page-lock the memory.
        warn: told if that fails; the slab is then pageable, and copies are slow but right.

    Attributes:
        tensors: the tensors, uninitialised, in order.
        flat: all bytes of the slab, as the tensors share them.
        pinned: whether the memory is page-locked.
    """

    def __init__(
        self, likes: Sequence[tuple[torch.Size, torch.dtype]], *, pin: bool, warn: Callable[[str], None]
    ) -> None:
        super().__init__(likes)
        num_bytes = self.num_bytes
        # Shared, not private: data loaders that fork must neither copy pinned pages nor lose them.
        self._map = mmap.mmap(-1, max(num_bytes, 1))
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8, count=max(num_bytes, 1))[:num_bytes]
        self.tensors = [
            torch.frombuffer(self._map, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
            for offset, (shape, dtype) in zip(self.offsets, self.likes, strict=True)
        ]
        self._registered: list[int] = []
        self.pinned = pin and num_bytes > 0 and self._register(num_bytes, warn)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """All elements at once."""
        yield 0, self.flat.view(self.dtype)

    def _register(self, num_bytes: int, warn: Callable[[str], None]) -> bool:
        start = self.flat.data_ptr()
        cudart = torch.cuda.cudart()
        for offset in range(0, num_bytes, _CHUNK_BYTES):
            error = cudart.cudaHostRegister(start + offset, min(_CHUNK_BYTES, num_bytes - offset), 0)
            if int(error) != 0:
                self.unpin()
                _swallow_cuda_error()
                warn(
                    f"Host memory could not be page-locked ({cudart.cudaGetErrorString(error)}); copies to and from"
                    " the GPU will be slow. Raise the limit of locked memory (`ulimit -l`, or the container's), or free"
                    " host memory."
                )
                return False
            self._registered.append(start + offset)
        return True

    def unpin(self) -> None:
        """End the registration. The tensors stay valid, as ordinary memory."""
        registered, self._registered = self._registered, []
        for start in registered:
            torch.cuda.cudart().cudaHostUnregister(start)
        self.pinned = False


def _swallow_cuda_error() -> None:
    """Clear the error that a failed registration leaves behind: the next kernel would report it as its own."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError:
        return
