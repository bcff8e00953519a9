"""Which schedule training steps run: a first guess, a plan from a file, or a better one once calls are measured."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import torch

from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.plan.costs import CallCost, MeasuredCosts
from lightning_roundpipe.plan.devices import Machine
from lightning_roundpipe.plan.files import load_schedule
from lightning_roundpipe.plan.memory import combined_bytes, largest_fused, stage_bytes
from lightning_roundpipe.plan.partition import balanced_evaluation_plan, balanced_plan
from lightning_roundpipe.plan.picture import plan_as_text, timeline_as_text
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.search import better_choice, judge
from lightning_roundpipe.plan.stages import Plan, Stage, StageKind
from lightning_roundpipe.plan.timeline import Lane, Timeline
from lightning_roundpipe.runtime.measurements import host_bytes_per_s, link_bytes_per_s
from lightning_roundpipe.runtime.stats import StepStats

__all__ = ["TrainingPlanner", "evaluation_schedule", "given_schedule", "measured_machine"]

_log = logging.getLogger(__name__)

# Soon, since a first guess may be far off; then when times have settled; then once more.
_SEARCH_AFTER = (3, 10, 30)

# Between two steps nothing else runs: a search must not take longer than this.
_LONGEST_SEARCH_S = 2.0
_MOST_CALLS = 300

_GROWTH = 0.6
"""Share of the free memory that a growing fused stage takes at once: sizes are estimates, and memory has gaps."""

_SAME = 1.02
"""Graphs whose sizes differ by no more than this factor are taken for equal: allocators round."""

_LINK_PROBE_BYTES = 64 * 2**20
_HOST_PROBE_BYTES = 256 * 2**20


class TrainingPlanner:
    """Makes the schedule of training steps, and a better one between steps when it knows what calls cost.

    [Note: A new plan does not change the numbers]
    A new plan cuts the same calls elsewhere. The fused stage keeps its calls: some kernels (of recurrent layers on the
    CPU, and compiled ones) give other bits with a graph than without. Sums of gradients are added up in the same order
    as long as there is one part of the micro-batches. Only with a free number of replica groups is the fused stage
    free, too: the last bits change anyway.

    [Note: Recomputation]
    Calls of the fused stage are not recomputed. On a GPU that runs all stages of its micro-batches, that stage grows
    at each new plan into a part of the memory that has not been in use until then (see `plan.memory.largest_fused`):
    how far depends on memory, and on times only where the update of the weights is the limit. Where the graphs of a
    call were not equally large in all steps, lengths vary, and memory is left free for longer ones.

    Args:
        num_workers: number of workers.
        given: a schedule to run as it is; None to search one.
        replica_groups: their number; None to let the search choose. Not used if a schedule is given.
        machine: makes the machine to search for, when it is first needed.
        grows_fused: whether a free fused stage may become larger than that of the first guess; not on a GPU, where it
            is not known how much memory its graph would take.
        recompute: ``"auto"``; ``"all"``: all calls but the last are recomputed; ``"none"``: none is, as the fused stage
            holds all of them.
        free_bytes: gives the memory that a larger fused stage may use on every worker; 0 where it is not known.
        notify: tells the user something.
        show: whether to tell the user of every plan with a picture.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        given: Schedule | None,
        replica_groups: int | None,
        machine: Callable[[], Machine],
        grows_fused: bool,
        recompute: str,
        free_bytes: Callable[[], float],
        notify: Callable[[str], None],
        show: bool,
    ) -> None:
        self._num_workers = num_workers
        self._given = given
        self._replica_groups = replica_groups
        self._make_machine = machine
        self._machine: Machine | None = None
        self._grows_fused = grows_fused
        self._recompute = recompute
        self._free_bytes = free_bytes
        self._graph_bytes: list[Mapping[int, int]] = []
        self._first_graphs: Mapping[int, int] = {}
        self._step_s = self._update_s = 0.0
        self._grown_bytes = 0
        self._notify = notify
        self._show = show
        self._sizes: tuple[CallCost, ...] = ()
        self._measured: MeasuredCosts | None = None
        self._num_measured = 0
        self._searches: tuple[int, ...] = _SEARCH_AFTER
        self.schedule: Schedule | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether times of calls are of use."""
        return self._given is None and bool(self._searches)

    def make(self, sizes: Sequence[CallCost], num_microbatches: int) -> Schedule:
        """The schedule to begin with.

        Args:
            sizes: the calls in order, with their bytes.
            num_microbatches: number of micro-batches of a step.

        Raises:
            PlanError: the given schedule is for another number of calls.
        """
        self._sizes, self._measured, self._num_measured = tuple(sizes), None, 0
        self._graph_bytes.clear()
        self._grown_bytes = 0
        if self._given is not None:
            if self._given.plan.num_calls != len(sizes):
                raise PlanError(
                    f"A plan must cover every call of a unit, of which this model makes {len(sizes)} in a micro-batch,"
                    f" but the one in the file covers {self._given.plan.num_calls}. Search a plan for this model, or"
                    " use `plan='auto'`."
                )
            self.schedule = self._given
        else:
            groups = self._replica_groups or (1 if self._recompute != "none" else self._num_workers)
            plan = balanced_plan([call.weight_bytes for call in sizes], max(1, self._num_workers // groups))
            if self._recompute != "auto":
                plan = plan.with_fused(min(1, len(sizes)) if self._recompute == "all" else len(sizes))
            self.schedule = Schedule(plan, self._num_workers, num_microbatches, groups)
        if self._show:
            self._notify(f"Plan: {self._describe()}, drawn as if times went by bytes:\n{self._picture()}")
        return self.schedule

    def observe(self, stats: StepStats) -> None:
        """Learn from a training step what calls cost; steps of another number of micro-batches say nothing."""
        if stats.probed:
            self._first_graphs = stats.graph_bytes
        if not self.is_measuring or stats.probed or stats.schedule != self.schedule:
            return
        samples: dict[tuple[int, StageKind], list[float]] = defaultdict(list)
        for span in stats.spans:
            for call, time_s in span.call_seconds().items():
                samples[call, span.kind].append(time_s)
        # The middle one of the micro-batches: the first of a stage may have waited for weights.
        middle = {key: median_low(times) for key, times in samples.items()}
        if self._measured is None:
            self._measured = MeasuredCosts(_first_costs(self._sizes, middle))
        else:
            for (call, kind), seconds in middle.items():
                self._measured.observe(Stage(call, kind, call, call + 1), seconds)
        self._num_measured += 1
        self._graph_bytes.append(stats.graph_bytes)
        self._step_s, self._update_s = stats.stop_s - stats.start_s, stats.update_s

    def improve(self, *, one_part: bool) -> Schedule | None:
        """Search anew, if it is time to.

        Args:
            one_part: whether there must be a single replica group, because micro-batches depend on each other's order.

        Returns:
            A schedule that is predicted to be worth the change, in use from now on; None to go on as before.
        """
        if not self.is_measuring or self._num_measured < self._searches[0]:
            return None
        assert self.schedule is not None
        assert self._measured is not None
        self._searches = self._searches[1:]
        grown = self._grow_fused()
        if len(self._sizes) > _MOST_CALLS:
            self._searches = ()
            return grown
        start = time.perf_counter()
        fused = self.schedule.plan.fused
        is_free = self._replica_groups is None and self._recompute == "auto"
        machine = self._machine_now()
        try:
            choices = better_choice(
                self.schedule,
                self._measured.costs,
                # What has grown fits, whatever was guessed.
                replace(machine, worker_memory_bytes=max(machine.worker_memory_bytes, self._grown_bytes)),
                replica_groups=1 if one_part else self._replica_groups,
                num_rounds=1,
                min_fused=1 if is_free or fused is None else fused,
                max_fused=None if is_free and self._grows_fused else fused,
            )
        except PlanError:
            _log.debug("no searched plan fits", exc_info=True)
            choices = None
        if time.perf_counter() - start > _LONGEST_SEARCH_S:
            self._searches = ()
        if choices is None:
            return grown
        before, after = choices
        self.schedule = after.schedule
        self._notify(
            f"New plan after {self._num_measured} measured steps: {self._describe()}. Predicted step time:"
            f" {1e3 * after.step_s:.1f} ms instead of {1e3 * before.step_s:.1f} ms."
            + (f"\n{self._picture()}" if self._show else "")
        )
        return self.schedule

    def _grow_fused(self) -> Schedule | None:
        """Take more calls into the fused stage, where memory allows."""
        schedule, measured = self.schedule, self._measured
        assert schedule is not None
        assert measured is not None
        samples, self._graph_bytes = self._graph_bytes, []
        if self._recompute != "auto" or schedule.group_size > 1:
            return None
        known = _known_graphs(self._sizes, samples, self._first_graphs)
        if known is None:
            return None
        fused = largest_fused(
            [replace(cost, graph_bytes=size) for cost, size in zip(measured.costs, known, strict=True)],
            schedule.plan,
            num_microbatches=-(-schedule.num_microbatches // schedule.replica_groups),
            free_bytes=_GROWTH * self._free_bytes(),
            weight_bytes=self._machine_now().worker_memory_bytes,
            step_s=self._step_s,
            update_s=self._update_s,
        )
        more = fused - (schedule.plan.fused or 0)
        if more == 0:
            return None
        plan = schedule.plan.with_fused(fused)
        self._grown_bytes = combined_bytes([stage_bytes(self._sizes, stage) for stage in plan.stages], plan)
        self.schedule = replace(schedule, plan=plan)
        self._notify(f"{more} more calls need not be recomputed: their graphs fit. Plan: {self._describe()}.")
        return self.schedule

    def predicted_timeline(self) -> Timeline | None:
        """What the simulator says of the schedule in use; None until costs have been measured."""
        if self.schedule is None or self._measured is None:
            return None
        return judge(self.schedule, self._measured.costs, self._machine_now()).timeline

    def _machine_now(self) -> Machine:
        if self._machine is None:
            self._machine = self._make_machine()
        return self._machine

    def _describe(self) -> str:
        schedule = self.schedule
        assert schedule is not None
        text = plan_as_text(schedule.plan)
        return text if schedule.replica_groups == 1 else f"{text}; {schedule.replica_groups} replica groups"

    def _picture(self) -> str:
        schedule = self.schedule
        assert schedule is not None
        costs = self._measured.costs if self._measured is not None else _costs_by_bytes(self._sizes)
        return timeline_as_text(judge(schedule, costs, Machine(num_workers=self._num_workers)).timeline, schedule.plan)


def _first_costs(sizes: Sequence[CallCost], seconds: Mapping[tuple[int, StageKind], float]) -> list[CallCost]:
    """Costs from the times of one step, by call and kind of stage; a call without a backward stage needs none."""
    costs = []
    for call, size in enumerate(sizes):
        fused_s = seconds.get((call, StageKind.FUSED))
        if fused_s is not None:
            forward_s, recompute_s, backward_s = fused_s / 3, None, 2 * fused_s / 3  # two products for one
        else:
            forward_s = seconds.get((call, StageKind.FORWARD), 0.0)
            both_s = seconds.get((call, StageKind.BACKWARD), 0.0)
            recompute_s = min(forward_s, both_s / 2)
            backward_s = both_s - recompute_s
        costs.append(replace(size, forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s))
    return costs


def _known_graphs(
    sizes: Sequence[CallCost], samples: Sequence[Mapping[int, int]], first: Mapping[int, int]
) -> list[int] | None:
    """The bytes of every call's graph: its own, or that of a call of the same size; 0 for what nothing is known of.

    Args:
        sizes: the calls.
        samples: what was measured in the steps that count.
        first: what was measured in the first step, for calls of which these have none like them. Nothing was compiled
            then, and weights came in between: it is too much rather than too little.

    Returns:
        None if they were not the same in all ``samples``.
    """
    alike: dict[CallCost, int] = {}
    for call, size in samples[-1].items():
        others = [sample.get(call, 0) for sample in samples]
        if max(others) > _SAME * min(others):
            return None
        alike[sizes[call]] = max(size, alike.get(sizes[call], 0))
    return [alike.get(size, first.get(call, 0)) for call, size in enumerate(sizes)]


def _costs_by_bytes(sizes: Sequence[CallCost]) -> list[CallCost]:
    mean = sum(size.weight_bytes for size in sizes) / max(1, len(sizes)) or 1.0
    shares = [0.01 + size.weight_bytes / mean for size in sizes]
    return [replace(size, forward_s=share, backward_s=2 * share) for size, share in zip(sizes, shares, strict=True)]


def evaluation_schedule(num_workers: int, sizes: Sequence[CallCost], num_microbatches: int) -> Schedule:
    """The schedule of steps that only evaluate."""
    # Steps that call no unit still take turns, at a stage without calls.
    plan = balanced_evaluation_plan([call.weight_bytes for call in sizes], num_workers) if sizes else Plan((), 0)
    return Schedule(plan, num_workers, num_microbatches)


def given_schedule(
    plan: str,
    replica_groups: int | None,
    num_workers: int,
    num_microbatches: int | None,
    recompute: str = "auto",
) -> Schedule | None:
    """What `RoundPipeStrategy(plan=...)` says, checked against everything that is known before the first step.

    Args:
        plan: a JSON file, or ``"auto"``.
        replica_groups: number of replica groups that is wanted; None for any.
        num_workers: number of workers that there are.
        num_microbatches: number of micro-batches that is wanted; None for any.
        recompute: see `TrainingPlanner`.

    Returns:
        The schedule in the file; None for ``"auto"``.

    Raises:
        PlanError: there is no such file, it holds no schedule for training, or one for other numbers; or there can not
            be that many replica groups.
    """
    if plan == "auto":
        Schedule(Plan((), 0), num_workers, 1, replica_groups or 1)  # Refuses what does not divide the workers.
        if recompute == "none" and replica_groups not in (None, num_workers):
            raise PlanError(
                "Without recomputation there is a single stage, in which every worker needs micro-batches of its own,"
                f" but got `replica_groups={replica_groups}` for {num_workers} workers. Use"
                f" `replica_groups={num_workers}`."
            )
        return None
    if not Path(plan).is_file():
        raise PlanError(f"`plan` must be 'auto' or a JSON file that holds a plan, but there is no file {plan!r}.")
    schedule = load_schedule(plan)
    if not schedule.plan.trains:
        raise PlanError(f"A plan for training must have a fused stage, but the one in {plan} only evaluates.")
    if schedule.num_workers != num_workers:
        raise PlanError(
            f"The plan in {plan} is for {schedule.num_workers} workers, but there are {num_workers}. Use"
            f" `Trainer(devices={schedule.num_workers})`, search a plan for {num_workers}, or use `plan='auto'`."
        )
    if num_microbatches not in (None, schedule.num_microbatches):
        raise PlanError(
            f"The plan in {plan} is for {schedule.num_microbatches} micro-batches, but `num_microbatches` is"
            f" {num_microbatches}. Use `num_microbatches='auto'`, or another plan."
        )
    return schedule


def measured_machine(devices: Sequence[torch.device], weight_bytes: float) -> Machine:
    """The workers and their links, measured where these are GPUs.

    Args:
        devices: the device of each worker.
        weight_bytes: memory of each worker for weights and their gradients.
    """
    device = devices[0]
    if device.type != "cuda":
        return Machine(num_workers=len(devices))
    sharing = max(devices.count(other) for other in devices)
    h2d, d2h = (link_bytes_per_s([device], [lane], _LINK_PROBE_BYTES)[0][lane] for lane in (Lane.H2D, Lane.D2H))
    return Machine(
        num_workers=len(devices),
        h2d_bytes_per_s=h2d / sharing,
        d2h_bytes_per_s=d2h / sharing,
        host_bytes_per_s=host_bytes_per_s(_HOST_PROBE_BYTES),
        worker_memory_bytes=weight_bytes,
    )
