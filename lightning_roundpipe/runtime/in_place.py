"""Weights that are uploaded from where they are: in ordinary memory, or in files."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_roundpipe.runtime.layout import Layout
from lightning_roundpipe.runtime.mapped import FileMappings

__all__ = ["InPlace"]


class InPlace(Layout):
    """Masters that stay where they are.

    Args:
        masters: all of one dtype.
        files: if they lie in files, which.

    Attributes:
        files: see above.
        pinned: False.
    """

    pinned = False

    def __init__(self, masters: Sequence[Tensor], files: FileMappings | None = None) -> None:
        super().__init__([(master.shape, master.dtype) for master in masters])
        self.files = files
        self._masters = list(masters)

    @property
    def tensors(self) -> list[Tensor]:
        """The masters as they are now, without a graph."""
        return [master.detach() for master in self._masters]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The elements of one tensor after another, each with its place in a copy, in elements."""
        for offset, tensor in zip(self.offsets, self.tensors, strict=True):
            if tensor.numel():
                yield offset // self.dtype.itemsize, tensor.contiguous().view(-1)
