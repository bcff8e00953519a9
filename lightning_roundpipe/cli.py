"""The command line: ``lightning-roundpipe simulate``, ``plan``, ``doctor`` and ``export``.

The first two predict; none of them needs a GPU.
"""

import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_roundpipe.exceptions import PlanError, RoundPipeError
from lightning_roundpipe.plan.costs import PRECISIONS, CallCost, CallCount, layer_costs
from lightning_roundpipe.plan.devices import PROFILES, Machine, load_profile, save_profile
from lightning_roundpipe.plan.files import save_schedule, schedule_to_dict
from lightning_roundpipe.plan.picture import draw_timeline, plan_as_text, timeline_as_text
from lightning_roundpipe.plan.predict import Setup, least_memory, longest_sequence, predict
from lightning_roundpipe.plan.schedule import FixedOrder, FixedSchedule, Schedule
from lightning_roundpipe.plan.search import Choice, judge, search, search_fixed
from lightning_roundpipe.plan.simulator import Boundary
from lightning_roundpipe.plan.stages import Plan
from lightning_roundpipe.plan.timeline import Lane

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

__all__ = ["main"]

# What is printed as JSON, or instead the rows of a table and the text below it.
_Answer = tuple[dict[str, Any], Mapping[str, Any], str]

_ROUNDPIPE = "roundpipe"

_HOST_BYTES_PER_S = 200e9
"""Where no profile tells: the peak of eight channels of DDR4-3200, rounded."""


def main(args: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit status: 0, or 1 after an error that is reported on stderr.
    """
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError:
        return _fail("The command line needs jsonargparse. Run `pip install lightning-roundpipe[cli]`.")
    parser = ArgumentParser(prog="lightning-roundpipe", description="Predicts training steps before they are run.")
    commands = parser.add_subcommands(dest="command")
    for name, (add_arguments, _, purpose) in _COMMANDS.items():
        command_parser = ArgumentParser(description=purpose)
        add_arguments(command_parser)
        commands.add_subcommand(name, command_parser, help=purpose)
    namespace = parser.parse_args(args)
    options = namespace[namespace.command]
    try:
        report, rows, text = _COMMANDS[namespace.command][1](options)
    except (RoundPipeError, ValueError, ModuleNotFoundError, OSError) as error:
        return _fail(str(error))
    if options.json:
        _write(json.dumps(report, indent=2))
    else:
        _write_table(namespace.command, rows)
        _write(text)
    return 0


def _add_simulate_arguments(parser: "ArgumentParser") -> None:
    add = parser.add_argument
    add("--layers", type=int, required=True, help="number of equal layers")
    add("--forward-ms", type=float, required=True, help="forward time of a layer and micro-batch")
    add("--backward-ms", type=float, required=True, help="its backward time, without recomputation")
    add("--head-forward-ms", type=float, default=0.0, help="forward time of the head and the loss")
    add("--head-backward-ms", type=float, default=0.0, help="their backward time")
    add("--hop-ms", type=float, default=0.0, help="from the end of a stage to the start of the next on another GPU")
    add("--gpus", type=int, required=True, help="number of workers")
    add("--speeds", type=list[float], default=[], help="their speeds, if they differ: [1,1,0.5,...]")
    add("--micro-batches", type=int, required=True, help="number of micro-batches of a step")
    add("--schedule", type=str, default=_ROUNDPIPE, help=f"{_ROUNDPIPE}, {', '.join(FixedOrder)}")
    add("--partition", type=str | None, default=None, help="layers per stage, `7-7|0-3-3-...`; searched by default")
    add("--replica-groups", type=str, default="auto", help="number of replica groups; with a partition, auto is 1")
    add("--rounds", type=str, default="auto", help="rounds of micro-batches; with a partition, auto is one per worker")
    add("--early-recompute", type=str, default="auto", help="yes, no; with a partition of roundpipe, auto is yes")
    add("--fused-layers", type=int, default=0, help="most layers of the fused stage, when it is searched")
    add("--sync", type=str, default="sync", help=f"what a step waits for: {', '.join(Boundary)}")
    add("--layer-mb", type=float, default=0.0, help="megabytes of weights of a layer, as uploaded")
    add("--head-mb", type=float, default=0.0, help="megabytes of weights of the head")
    add("--input-mb", type=float, default=0.0, help="megabytes of a layer's input for a micro-batch")
    add("--link-gb-per-s", type=float, default=0.0, help="bandwidth of each GPU's link, each way; 0 for no limit")
    add("--host-gb-per-s", type=float, default=0.0, help="bandwidth of host memory in all; 0 for no limit")
    add("--picture", type=str | None, default=None, help="image file to draw the step into")
    add("--json", action="store_true", help="print JSON")


def _simulate(options: "Namespace") -> _Answer:
    costs = _layer_costs(options)
    link = options.link_gb_per_s * 1e9 or float("inf")
    machine = Machine(
        num_workers=_at_least_one("gpus", options.gpus),
        speeds=tuple(options.speeds),
        hop_s=options.hop_ms / 1e3,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_bytes_per_s=options.host_gb_per_s * 1e9 or float("inf"),
    )
    boundary = Boundary(_one_of("sync", options.sync, list(Boundary)))
    order = _one_of("schedule", options.schedule, [_ROUNDPIPE, *FixedOrder])
    groups = None if options.replica_groups == "auto" else _integer("replica-groups", options.replica_groups)
    _at_least_one("micro-batches", options.micro_batches)
    early = _one_of("early-recompute", options.early_recompute, ["auto", "yes", "no"])
    if options.partition is not None:
        schedule = _schedule(options, order, groups or 1)
        default = "yes" if order == _ROUNDPIPE else "no"
        choice = judge(
            schedule, costs, machine, boundary=boundary, early_recompute=(early, default)[early == "auto"] == "yes"
        )
    elif order == _ROUNDPIPE:
        choice = search(
            costs,
            machine,
            options.micro_batches,
            boundary=boundary,
            replica_groups=groups,
            max_fused=1 + options.fused_layers,
            early_recompute=early == "yes",
        )
    else:
        choice = search_fixed(costs, machine, options.micro_batches, FixedOrder(order), boundary=boundary)
    plan, timeline = choice.schedule.plan, choice.timeline
    if options.picture:
        draw_timeline(timeline, plan, options.picture)
    report = _report(choice)
    return report, report, timeline_as_text(timeline, plan)


def _layer_costs(options: "Namespace") -> tuple[CallCost, ...]:
    def cost(forward_ms: float, backward_ms: float, megabytes: float) -> CallCost:
        num_bytes = int(megabytes * 1e6)
        return CallCost(
            forward_s=forward_ms / 1e3,
            backward_s=backward_ms / 1e3,
            weight_bytes=num_bytes,
            gradient_bytes=num_bytes,
            sum_bytes=2 * num_bytes,  # summed in fp32, from weights and gradients in 16 bits
            input_bytes=int(options.input_mb * 1e6),
        )

    return layer_costs(
        cost(options.forward_ms, options.backward_ms, options.layer_mb),
        _at_least_one("layers", options.layers),
        cost(options.head_forward_ms, options.head_backward_ms, options.head_mb),
    )


def _schedule(options: "Namespace", order: str, replica_groups: int) -> Schedule:
    """The schedule of ``--partition``, whose sizes count layers; the head comes on top of the last ones."""
    try:
        forward, *rest = [[int(size) for size in side.split("-")] for side in options.partition.split("|")]
    except ValueError:
        raise ValueError(
            "`--partition` must be layers per stage such as `7-7-7-7|0-3-3-3` (roundpipe) or `3-3-4-4` (others), but"
            f" got {options.partition!r}."
        ) from None
    if order != _ROUNDPIPE:
        forward[-1] += 1
        plan = Plan(tuple(forward), 0, tuple(forward[::-1]))
    else:
        if len(rest) != 1:
            raise ValueError(
                "`--partition` of roundpipe must have a forward and a backward side, `7-7-7-7|0-3-3-3`, but got"
                f" {options.partition!r}."
            )
        fused, *backward = rest[0]
        plan = Plan(tuple(forward), fused + 1, tuple(backward))
    if plan.num_calls != options.layers + 1:
        raise ValueError(
            f"`--partition` must hold {options.layers} layers, but {options.partition!r} holds {plan.num_calls - 1}."
        )
    if order != _ROUNDPIPE:
        return FixedSchedule(plan, options.gpus, options.micro_batches, order=FixedOrder(order))
    rounds = max(1, options.micro_batches // options.gpus)
    if options.rounds != "auto":
        rounds = _integer("rounds", options.rounds)
    return Schedule(plan, options.gpus, options.micro_batches, replica_groups, num_rounds=rounds)


def _report(choice: Choice) -> dict[str, Any]:
    timeline, schedule = choice.timeline, choice.schedule
    window = timeline.settled_window
    bubble = timeline.bubble(window)
    return {
        "makespan_ms": 1e3 * choice.step_s,
        "bubble_pct": 100 * bubble.total,
        "fill_pct": 100 * bubble.fill,
        "drain_pct": 100 * bubble.drain,
        "steady_pct": 100 * bubble.steady,
        "stall_pct": 100 * bubble.stall,
        "partition": _partition(schedule),
        "replica_groups": schedule.replica_groups,
        "rounds": schedule.num_rounds,
        "link_busy_pct": {lane.value: 100 * timeline.busy(lane, window) for lane in Lane},
    }


def _partition(schedule: Schedule) -> str:
    """The inverse of ``--partition``: the head is the last call, and is not counted."""
    plan = schedule.plan
    if isinstance(schedule, FixedSchedule):
        return "-".join(map(str, (*plan.forward[:-1], plan.forward[-1] - 1)))
    forward = "-".join(map(str, plan.forward))
    return f"{forward}|{'-'.join(map(str, ((plan.fused or 1) - 1, *plan.backward)))}"


# plan


def _add_plan_arguments(parser: "ArgumentParser") -> None:
    add = parser.add_argument
    add("--model", type=str, required=True, help="folder of a Hugging Face causal language model, or its config.json")
    add("--gpu", type=str, default="rtx-4090", help=", ".join(PROFILES))
    add("--profile", type=str | None, default=None, help="JSON file with a measured profile, instead of --gpu")
    add("--gpus", type=int, default=1, help="number of GPUs")
    add("--sequence", type=int, default=2048, help="tokens of a sequence")
    add("--batch", type=int, default=16, help="sequences of a step")
    add("--precision", type=str, default="bf16-mixed", help=", ".join(PRECISIONS))
    add("--lora-rank", type=int, default=0, help="train LoRA adapters of this rank on all linear layers; 0 trains all")
    add("--loss", type=str, default="chunked", help="chunked, as fused losses form logits; or full, all at once")
    add("--sync", type=str, default="exact", help=f"what a step waits for: {', '.join(Boundary)}")
    add("--micro-batch", type=str, default="auto", help="sequences of a micro-batch")
    add("--fused-layers", type=str, default="auto", help="most layers of the fused stage; auto: as many as fit")
    add("--host-memory-gb", type=float | None, default=None, help="host memory; 0 for no limit; default: --profile's")
    add("--host-gb-per-s", type=float | None, default=None, help="its bandwidth; 0 for no limit; default: --profile's")
    add("--output", type=str | None, default=None, help="file to write the plan to")
    add("--json", action="store_true", help="print JSON")


def _plan(options: "Namespace") -> _Answer:
    sequence = _at_least_one("sequence", options.sequence)
    precision = PRECISIONS[_one_of("precision", options.precision, list(PRECISIONS))]
    loss = _one_of("loss", options.loss, ["chunked", "full"])
    boundary = Boundary(_one_of("sync", options.sync, list(Boundary)))
    if options.profile is not None:
        profile = load_profile(options.profile)
    else:
        profile = PROFILES[_one_of("gpu", options.gpu, list(PROFILES))]
    setup = Setup(
        counts=_counts(options.model, sequence, precision.compute_bytes, options.lora_rank),
        sequence=sequence,
        profile=profile,
        num_workers=_at_least_one("gpus", options.gpus),
        precision=precision,
        chunked_loss=loss == "chunked",
        host_bytes_per_s=_limit(options.host_gb_per_s, profile.host_bytes_per_s or _HOST_BYTES_PER_S),
        host_memory_bytes=_limit(options.host_memory_gb, profile.host_memory_bytes or math.inf),
    )
    _at_least_one("batch", options.batch)
    report: dict[str, Any] = {"max_sequence": longest_sequence(setup)}
    if setup.chunked_loss:
        report["max_sequence_full_loss"] = longest_sequence(replace(setup, chunked_loss=False))
    try:
        prediction = predict(
            setup,
            options.batch,
            boundary=boundary,
            microbatch=None if options.micro_batch == "auto" else _integer("micro-batch", options.micro_batch),
            max_fused=None if options.fused_layers == "auto" else 1 + _integer("fused-layers", options.fused_layers, 0),
        )
    except PlanError as error:
        gpu_peak_bytes, on_host = least_memory(setup, sequence)
        report = {"fits": False, "gpu_peak_bytes": gpu_peak_bytes, "host_bytes": on_host} | report
        report |= {"step_ms": None, "tokens_per_s": None, "bubble_pct": None, "limit": "memory", "plan": None}
        return report, report, str(error)
    choice = prediction.choice
    if options.output is not None:
        save_schedule(choice.schedule, options.output)
    report = {
        "fits": True,
        "gpu_peak_bytes": choice.worker_bytes,
        "host_bytes": choice.host_bytes,
        "step_ms": 1e3 * choice.step_s,
        "tokens_per_s": prediction.tokens_per_s,
        "bubble_pct": 100 * choice.timeline.bubble(choice.timeline.settled_window).total,
        "limit": prediction.limit,
        "busy_pct": {name: 100 * share for name, share in prediction.busy.items()},
        "micro_batch": prediction.microbatch,
        **report,
        "plan": schedule_to_dict(choice.schedule),
    }
    plan = choice.schedule.plan
    return report, report, f"{plan_as_text(plan)}\n{timeline_as_text(choice.timeline, plan)}"


def _limit(giga: float | None, default: float) -> float:
    """A limit that is given in 10^9; 0 is none."""
    return default if giga is None else giga * 1e9 or math.inf


def _counts(path: str, sequence: int, compute_bytes: int, lora_rank: int) -> tuple[CallCount, ...]:
    """Counts the calls of a causal language model for one sequence, from its configuration alone."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Planning from a configuration needs transformers. Run `pip install lightning-roundpipe[hf]`."
        ) from error
    if not Path(path).exists():
        raise ValueError(f"`--model` must be a folder with a config.json, or such a file, but {path!r} does not exist.")
    from lightning_roundpipe.runtime.counting import count_calls

    config = AutoConfig.from_pretrained(path)
    make_model: Callable[..., torch.nn.Module] = AutoModelForCausalLM.from_config

    def build() -> "torch.nn.Module":
        dtype = torch.float32 if compute_bytes == 4 else torch.bfloat16
        model = make_model(config, dtype=dtype)
        return _with_lora(model, lora_rank) if lora_rank else model

    def batch() -> dict[str, Any]:
        return {"input_ids": torch.zeros(1, sequence, dtype=torch.long), "use_cache": False}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of their own names is of no use to the caller
        return count_calls(build, batch, causal=True)


def _with_lora(model: "torch.nn.Module", rank: int) -> "torch.nn.Module":
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("`--lora-rank` needs peft. Run `pip install lightning-roundpipe[hf]`.") from error
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), autocast_adapter_dtype=False)


# doctor


def _add_doctor_arguments(parser: "ArgumentParser") -> None:
    add = parser.add_argument
    add("--output", type=str | None, default=None, help="file to write the profile for `plan --profile` to")
    add("--pin-gb", type=float | None, default=None, help="host memory to try to pin; default: half, 17 at most")
    add("--json", action="store_true", help="print JSON")


def _doctor(options: "Namespace") -> _Answer:
    from lightning_roundpipe import doctor  # Imports torch, which the other commands do without.

    pin_bytes = None if options.pin_gb is None else int(options.pin_gb * 1e9)
    checkup = doctor.examine(pin_bytes=pin_bytes, needs_gpu=options.output is not None)
    if options.output is not None:
        save_profile(doctor.measured_profile(checkup), options.output)
    found = [f"- {finding}" for finding in doctor.findings(checkup)]
    text = ["What is wrong:", *found] if found else ["Nothing wrong was found."]
    if options.output is not None:
        text.append(f"{options.output} is for `lightning-roundpipe plan --profile {options.output}`.")
    return doctor.report(checkup), doctor.rows(checkup), "\n".join(text)


# export


def _add_export_arguments(parser: "ArgumentParser") -> None:
    add = parser.add_argument
    add("--checkpoint", type=str, required=True, help="a Lightning checkpoint: a file, or the folder of a sharded one")
    add("--model", type=str, required=True, help="folder with the config.json, and with weights that were frozen")
    add("--output", type=str, required=True, help="folder to write")
    add("--prefix", type=str | None, default=None, help="of the model's keys in the checkpoint; default: found")
    add("--dtype", type=str, default="stored", help="stored, float32, bfloat16 or float16")
    add("--max-shard-size", type=str, default="5GB", help="size of a file")
    add("--trusted", action="store_true", help="read checkpoints that hold objects: doing so may run code")
    add("--json", action="store_true", help="print JSON")


def _export(options: "Namespace") -> _Answer:
    import torch

    from lightning_roundpipe.export import export_checkpoint

    name = _one_of("dtype", options.dtype, ["stored", "float32", "bfloat16", "float16"])
    prefix = export_checkpoint(
        options.checkpoint,
        options.model,
        options.output,
        prefix=options.prefix,
        trusted=options.trusted,
        dtype=None if name == "stored" else getattr(torch, name),
        max_shard_size=options.max_shard_size,
    )
    report = {"folder": options.output, "prefix": prefix, "dtype": name}
    return report, report, ""


_COMMANDS: dict[str, tuple[Callable[["ArgumentParser"], None], Callable[["Namespace"], _Answer], str]]
_COMMANDS = {
    "simulate": (_add_simulate_arguments, _simulate, "Simulate a step from the times of layers."),
    "plan": (_add_plan_arguments, _plan, "Say whether a model fits, how fast it trains, and what limits it."),
    "export": (_add_export_arguments, _export, "Turn a Lightning checkpoint into a Hugging Face one."),
    "doctor": (_add_doctor_arguments, _doctor, "Measure this machine and say what is wrong with it for streaming."),
}


# Output


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 1


def _write_table(title: str, report: Mapping[str, Any]) -> None:
    """Prints a report as a table, with rich where it is installed."""
    rows = [(name.replace("_", " "), _text(value)) for name, value in report.items()]
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        width = max(len(name) for name, _ in rows)
        _write("\n".join(f"{name:{width}}  {value}" for name, value in rows))
        return
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout).print(table)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


# Checks of arguments


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"`--{name}` must be one of {', '.join(allowed)}, but got {value!r}.")
    return value


def _integer(name: str, value: str, least: int = 1) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"`--{name}` must be a whole number of at least {least} or `auto`, but got {value!r}.")
    return int(value)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"`--{name}` must be at least 1, but got {value}.")
    return value
