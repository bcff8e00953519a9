"""Schedules as JSON: to look at, to keep, to use again."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan

__all__ = ["load_schedule", "save_schedule", "schedule_from_dict", "schedule_to_dict"]

_VERSION = 1


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """A schedule as numbers, lists and names that JSON knows; what has its default is left out."""
    plan = schedule.plan
    content: dict[str, Any] = {"version": _VERSION, "forward": list(plan.forward)}
    if plan.fused is not None:
        content |= {"fused": plan.fused, "backward": list(plan.backward)}
    for field in fields(Schedule):
        value = getattr(schedule, field.name)
        if field.name != "plan" and value != field.default:
            content[field.name] = value
    return content


def schedule_from_dict(content: Mapping[str, Any]) -> Schedule:
    """The inverse of :func:`schedule_to_dict`.

    Raises:
        PlanError: the content is of another version, incomplete, or no valid schedule.
    """
    values = dict(content)
    version = values.pop("version", None)
    if version != _VERSION:
        raise PlanError(
            f"A plan file must be of version {_VERSION}, but this one is of {version}. Search the plan anew."
        )
    known = {field.name for field in fields(Schedule)} - {"plan"} | {"forward", "fused", "backward"}
    needed = {"forward", "num_workers", "num_microbatches"}
    if values.keys() - known or needed - values.keys():
        raise PlanError(
            f"A plan file must hold {', '.join(sorted(needed))} and may hold {', '.join(sorted(known - needed))}, but"
            f" got {', '.join(sorted(values)) or 'nothing'}."
        )
    try:
        plan = Plan(tuple(values.pop("forward")), values.pop("fused", None), tuple(values.pop("backward", ())))
        return Schedule(plan, **{name: _frozen(value) for name, value in values.items()})
    except TypeError as error:
        raise PlanError(f"A plan file must hold whole numbers and lists of them, but: {error}.") from error


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Writes a schedule to a JSON file."""
    Path(path).write_text(json.dumps(schedule_to_dict(schedule), indent=2) + "\n", encoding="utf-8")


def load_schedule(path: str | Path) -> Schedule:
    """Reads a schedule from a JSON file.

    Raises:
        PlanError: the file is no JSON, or holds no valid schedule.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"A plan file must be JSON, but {path} is not: {error}.") from error
    if not isinstance(content, dict):
        raise PlanError(f"A plan file must hold a JSON object, but {path} holds a {type(content).__name__}.")
    return schedule_from_dict(content)
