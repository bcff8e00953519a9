"""A timeline in Chrome's trace format, which Perfetto and other viewers read."""

from typing import Any

from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Lane, Timeline

__all__ = ["chrome_trace"]

_ROWS = {"tickets": 0, Lane.H2D: 1, Lane.D2H: 2}
_ROW_NAMES = {"tickets": "tickets", Lane.H2D: "uploads", Lane.D2H: "downloads"}


def chrome_trace(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """A process for each worker with rows for tickets, uploads and downloads, and one for the host.

    Args:
        timeline: what is shown.
        plan: its stages.

    Returns:
        The content of a JSON file: complete events ("X") with times in microseconds. Source of the format: "Trace Event
        Format", the Chromium project.
    """
    events: list[dict[str, Any]] = []
    for worker in range(timeline.num_workers):
        events.append(_named("process_name", worker, 0, f"worker {worker}"))
        events += [_named("thread_name", worker, row, _ROW_NAMES[key]) for key, row in _ROWS.items()]
    host = timeline.num_workers
    if any(transfer.lane is Lane.CPU for transfer in timeline.transfers):
        events.append(_named("process_name", host, 0, "host"))
    for span in timeline.spans:
        stage = plan.stages[span.stage]
        about = {"stage": span.stage, "micro-batch": span.microbatch, "calls": [stage.start, stage.stop]}
        name = f"{stage.kind} {span.stage}, micro-batch {span.microbatch}"
        events.append(_complete(name, str(stage.kind), span.worker, 0, span.start, span.stop, about))
    for transfer in timeline.transfers:
        on_host = transfer.lane is Lane.CPU
        events.append(
            _complete(
                f"{transfer.num_bytes / 1e6:.1f} MB",
                str(transfer.lane),
                host if on_host else transfer.worker,
                0 if on_host else _ROWS[transfer.lane],
                transfer.start,
                transfer.stop,
                {"bytes": int(transfer.num_bytes)},
            )
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _complete(
    name: str, category: str, process: int, row: int, start_s: float, stop_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * (stop_s - start_s), 3)}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": row, **times, "args": about}
