"""Where weights lie in host memory: page-locked, in ordinary memory, or in the files from which they were loaded."""

from dataclasses import dataclass
from enum import Enum
from math import inf

__all__ = ["HOST_WEIGHTS", "Home", "WeightPlacement"]

HOST_WEIGHTS = ("auto", "pinned", "pageable", "mmap")
"""Ways to keep weights in host memory; see `WeightPlacement`."""


class Home(Enum):
    """Where a weight is kept."""

    PINNED = "page-locked memory"
    PAGEABLE = "ordinary memory"
    FILE = "a file"


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """How weights lie in host memory. Trainable ones never stay in files.

    Attributes:
        kind: ``"pinned"``: page-locked, where there are GPUs; ``"pageable"``: in ordinary memory; ``"mmap"``: frozen
            weights that lie in files stay there, others are pinned; ``"auto"``: frozen weights that lie in files are
            taken out of them and pinned while ``room_bytes`` last, others are pinned.
        room_bytes: of host memory for weights that lie in files now, with ``"auto"``.
    """

    kind: str = "auto"
    room_bytes: float = inf

    def home(self, *, trainable: bool, in_file: bool, num_bytes: int, taken_bytes: int) -> Home:
        """Where to keep weights that are uploaded together.

        Args:
            trainable: whether they are trained.
            in_file: whether they lie in a file now.
            num_bytes: their bytes.
            taken_bytes: bytes of frozen weights that were taken out of files before.
        """
        if self.kind == "pageable":
            return Home.PAGEABLE
        if not in_file or trainable or self.kind == "pinned":
            return Home.PINNED
        stays = self.kind == "mmap" or taken_bytes + num_bytes > self.room_bytes
        return Home.FILE if stays else Home.PINNED
