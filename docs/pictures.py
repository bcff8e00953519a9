"""Draws the pictures of the documentation from simulated steps.

python docs/pictures.py FOLDER
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_roundpipe.plan.costs import CallCost, layer_costs
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.picture import draw_timeline
from lightning_roundpipe.plan.schedule import FixedOrder
from lightning_roundpipe.plan.search import Choice, search, search_fixed

# Eight layers and a head, on four workers; backward takes twice as long as forward, and recomputes before.
NUM_WORKERS = 4
NUM_MICROBATCHES = 8
LAYER = CallCost(forward_s=10e-3, backward_s=20e-3, weight_bytes=400_000_000, gradient_bytes=400_000_000)
HEAD = CallCost(forward_s=8e-3, backward_s=16e-3, weight_bytes=600_000_000, gradient_bytes=600_000_000)
COSTS = layer_costs(LAYER, 8, HEAD)
MACHINE = Machine(
    num_workers=NUM_WORKERS, hop_s=1e-3, h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9, host_bytes_per_s=200e9
)


def roundpipe(replica_groups: int, num_microbatches: int = NUM_MICROBATCHES) -> Choice:
    """The plan that the search finds; the head alone is fused."""
    return search(COSTS, MACHINE, num_microbatches, replica_groups=replica_groups, max_fused=1, num_rounds=1)


def draw_schedule(path: Path, replica_groups: int) -> None:
    """A step of RoundPipe."""
    choice = roundpipe(replica_groups)
    draw_timeline(choice.timeline, choice.schedule.plan, path)


def draw_fixed(path: Path) -> None:
    """A step of GPipe: each worker keeps its layers."""
    choice = search_fixed(COSTS, MACHINE, NUM_MICROBATCHES, FixedOrder.GPIPE)
    draw_timeline(choice.timeline, choice.schedule.plan, path)


def draw_curve(path: Path) -> None:
    """Bubble ratio by number of micro-batches, for every number of replica groups."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    numbers = [4, 6, 8, 12, 16, 24, 32]
    for groups in (1, 2, 4):
        ratios = [100 * roundpipe(groups, number).timeline.bubble().total for number in numbers]
        axes.plot(numbers, ratios, marker="o", label=f"replica_groups={groups}")
    axes.set(xlabel="micro-batches", ylabel="bubble ratio (%)", xticks=numbers, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "roundpipe.svg": lambda path: draw_schedule(path, 1),
    "roundpipe_groups.svg": lambda path: draw_schedule(path, NUM_WORKERS),
    "gpipe.svg": draw_fixed,
    "micro_batches.svg": draw_curve,
}


def draw_all(folder: Path) -> Iterator[Path]:
    """Draws every picture into ``folder`` and yields its path."""
    for name, draw in PICTURES.items():
        draw(folder / name)
        yield folder / name


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    list(draw_all(target))
