"""Published figures to check against, from the files beside this one."""

import csv
from pathlib import Path

from lightning_roundpipe.plan.costs import CallCost, layer_costs
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.schedule import FixedOrder, FixedSchedule, Schedule
from lightning_roundpipe.plan.stages import Plan


def rows(name):
    with (Path(__file__).parent / "published" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


TIMES = {row["model"]: row for row in rows("layer_times")}


def seconds(model, name):
    return float(TIMES[model][f"{name}_ms"]) / 1e3


def costs_of(model, **of_layer):
    """Costs of the published simulation."""
    layer = CallCost(forward_s=seconds(model, "forward"), backward_s=seconds(model, "backward"), **of_layer)
    head = CallCost(forward_s=seconds(model, "head_forward"), backward_s=seconds(model, "head_backward"))
    return layer_costs(layer, int(TIMES[model]["layers"]), head)


def machine_of(model, **links):
    return Machine(num_workers=8, hop_s=seconds(model, "hop"), **links)


def schedule_of(row):
    """The schedule of a row of bubbles.csv, whose partition counts layers, without the head."""
    forward, *backward = ([int(size) for size in side.split("-")] for side in row["partition"].split("|"))
    if row["schedule"] == "roundpipe":
        plan = Plan(tuple(forward), backward[0][0] + 1, tuple(backward[0][1:]))
        return Schedule(plan, num_workers=8, num_microbatches=16, num_rounds=2)
    forward[-1] += 1
    plan = Plan(tuple(forward), 0, tuple(forward[::-1]))
    return FixedSchedule(plan, num_workers=8, num_microbatches=16, order=FixedOrder(row["schedule"]))
