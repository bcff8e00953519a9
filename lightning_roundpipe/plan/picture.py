"""Timelines to look at: as text for a terminal, as a picture for a file."""

from pathlib import Path

from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.plan.timeline import Timeline

__all__ = ["draw_timeline", "plan_as_text", "timeline_as_text"]

_LETTERS = {StageKind.FORWARD: "fF", StageKind.FUSED: "xX", StageKind.BACKWARD: "bB"}
_COLOURS = {StageKind.FORWARD: "#4878d0", StageKind.FUSED: "#ee854a", StageKind.BACKWARD: "#6acc64"}


def timeline_as_text(timeline: Timeline, plan: Plan, width: int = 100) -> str:
    """One line for each worker, from the start of the first step to the end of the last.

    ``f``, ``x`` and ``b`` are forward, fused and backward stages, in capitals where a stage has an odd number; ``.`` is
    a wait.

    Args:
        timeline: what is shown.
        plan: its stages.
        width: columns for the whole time.
    """
    scale = timeline.makespan / width or 1.0
    lines = [["."] * width for _ in range(timeline.num_workers)]
    # A column shows what was computed in its middle.
    for span in timeline.spans:
        letter = _LETTERS[plan.stages[span.stage].kind][span.stage % 2]
        for column in range(max(0, round(span.start / scale)), min(width, round(span.stop / scale))):
            lines[span.worker][column] = letter
    return "\n".join(f"worker {worker:2d} |{''.join(line)}|" for worker, line in enumerate(lines))


def plan_as_text(plan: Plan) -> str:
    """The stages of a plan, one line for each direction, with runs of equal sizes folded.

    For example ``forward: 4 x 7 calls; fused: 1; backward: 8 x 3, 2 x 2``.
    """
    forward = f"forward: {_folded(plan.forward)}"
    if not plan.trains:
        return forward
    return f"{forward}; fused: {plan.fused}; backward: {_folded(plan.backward)}"


def _folded(sizes: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return ", ".join(f"{count} x {size}" for count, size in runs) + " calls" if runs else "nothing"


def draw_timeline(timeline: Timeline, plan: Plan, path: str | Path) -> None:
    """Draws the workers' tickets into an image file.

    Args:
        timeline: what is shown.
        plan: its stages.
        path: the file; its suffix decides on the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "A picture needs matplotlib, which is not installed. Run `pip install lightning-roundpipe[plots]`."
        ) from error
    # A figure of its own, not of pyplot: no global state, no window.
    figure = Figure(figsize=(14, 1.5 + 0.4 * timeline.num_workers), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for worker in range(timeline.num_workers):
        for kind, colour in _COLOURS.items():
            spans = [s for s in timeline.spans if s.worker == worker and plan.stages[s.stage].kind is kind]
            bars = [(1e3 * span.start, 1e3 * (span.stop - span.start)) for span in spans]
            axes.broken_barh(bars, (worker - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set(xlabel="time (ms)", ylabel="worker", xlim=(0, 1e3 * timeline.makespan), yticks=range(timeline.num_workers))
    axes.invert_yaxis()
    axes.set_title(f"{plan_as_text(plan)}; bubble {100 * timeline.bubble().total:.1f} %", fontsize=10)
    figure.legend(handles=[Patch(color=c, label=k.value) for k, c in _COLOURS.items()], loc="outside right upper")
    figure.savefig(path, dpi=150)
