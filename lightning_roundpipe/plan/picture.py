"""Timelines to look at: as text for a terminal, as a picture for a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_roundpipe.plan.stages import Plan, StageKind
from lightning_roundpipe.plan.timeline import Lane, Timeline

__all__ = ["draw_timeline", "draw_timelines", "plan_as_text", "timeline_as_text"]

_LETTERS = {StageKind.FORWARD: "fF", StageKind.FUSED: "xX", StageKind.BACKWARD: "bB"}
_LABELS = {
    StageKind.FORWARD: "forward",
    StageKind.FUSED: "fused (forward, loss, backward)",
    StageKind.BACKWARD: "recomputation and backward",
}
_LINKS = {Lane.H2D: ("#797979", -0.42), Lane.D2H: ("#d5bb67", 0.32)}
_LINK_LABELS = {Lane.H2D: "upload", Lane.D2H: "download"}
_LABEL_SHARE = 0.006
"""Share of the width from which a ticket has room for a label."""
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
    """Draws the workers' tickets and transfers into an image file.

    Args:
        timeline: what is shown.
        plan: its stages.
        path: the file; its suffix decides on the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    draw_timelines({"": timeline}, plan, path)


def draw_timelines(timelines: Mapping[str, Timeline], plan: Plan, path: str | Path) -> None:
    """Draws several timelines of one plan below each other, with one scale of time.

    Tickets are labelled with stage and micro-batch where there is room. A thin line above a worker's tickets shows its
    uploads, one below them its downloads.

    Args:
        timelines: what is shown, by title.
        plan: their stages.
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
    rows = max(timeline.num_workers for timeline in timelines.values())
    height = len(timelines) * (1.0 + 0.55 * rows)
    # A figure of its own, not of pyplot: no global state, no window.
    figure = Figure(figsize=(24, 0.8 + height), layout="constrained")
    FigureCanvasAgg(figure)
    every_axes = figure.subplots(len(timelines), squeeze=False)[:, 0]
    last = max(timeline.makespan for timeline in timelines.values()) or 1.0
    for axes, (title, timeline) in zip(every_axes, timelines.items(), strict=True):
        _draw(axes, timeline, plan, last)
        about = f"{plan_as_text(plan)}; bubble {100 * timeline.bubble().total:.1f} %"
        axes.set_title(f"{title}: {about}" if title else about, fontsize=10)
    every_axes[-1].set_xlabel("time (ms)")
    handles = [Patch(color=colour, label=_LABELS[kind]) for kind, colour in _COLOURS.items()]
    handles += [Patch(color=colour, label=_LINK_LABELS[lane]) for lane, (colour, _) in _LINKS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=110)


def _draw(axes: Any, timeline: Timeline, plan: Plan, last: float) -> None:
    for span in timeline.spans:
        kind = plan.stages[span.stage].kind
        start, width = 1e3 * span.start, 1e3 * (span.stop - span.start)
        axes.broken_barh(
            [(start, width)], (span.worker - 0.28, 0.56), facecolors=_COLOURS[kind], edgecolor="white", linewidth=0.4
        )
        share = (span.stop - span.start) / last
        if share > _LABEL_SHARE:
            text = f"s{span.stage}\nm{span.microbatch}"
            size = 7 if share > 2 * _LABEL_SHARE else 5.5
            axes.text(start + width / 2, span.worker, text, ha="center", va="center", fontsize=size, color="white")
    for lane, (colour, offset) in _LINKS.items():
        for worker in range(timeline.num_workers):
            moved = [t for t in timeline.transfers if t.lane is lane and t.worker == worker]
            bars = [(1e3 * t.start, 1e3 * (t.stop - t.start)) for t in moved]
            axes.broken_barh(bars, (worker + offset, 0.1), facecolors=colour, linewidth=0)
    first = min([0.0, *(1e3 * transfer.start for transfer in timeline.transfers)])
    axes.set(ylabel="worker", xlim=(first, 1e3 * last), yticks=range(timeline.num_workers))
    axes.set_ylim(timeline.num_workers - 0.5, -0.5)
