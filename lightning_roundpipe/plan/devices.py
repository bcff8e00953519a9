"""What the plan runs on: workers, links, host memory."""

from dataclasses import dataclass
from math import inf

__all__ = ["Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Workers of one machine and what they share.

    Args:
        num_workers: number of workers.
        speeds: speed of every worker; times of calls are divided by it. Empty for 1 everywhere.
        hop_s: seconds from the end of a stage on one worker to the start of the next one on another.
        h2d_bytes_per_s: bandwidth of each worker's link from the host.
        d2h_bytes_per_s: bandwidth of each worker's link to the host.
        host_bytes_per_s: host memory bandwidth that links and optimizer share.
        optimizer_bytes_per_s: host memory bandwidth that the optimizer (and the sum of gradients) reaches alone.
        worker_memory_bytes: memory of each worker that may be used.
        host_memory_bytes: host memory that may be used.
    """

    num_workers: int
    speeds: tuple[float, ...] = ()
    hop_s: float = 0.0
    h2d_bytes_per_s: float = inf
    d2h_bytes_per_s: float = inf
    host_bytes_per_s: float = inf
    optimizer_bytes_per_s: float = inf
    worker_memory_bytes: float = inf
    host_memory_bytes: float = inf

    def speed(self, worker: int) -> float:
        """Speed of ``worker``."""
        return self.speeds[worker] if self.speeds else 1.0
