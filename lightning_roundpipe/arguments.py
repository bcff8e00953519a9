"""The arguments of `RoundPipeStrategy`: what is allowed, and what is made of it."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lightning_roundpipe.chunked_loss import KERNELS, liger_is_installed
from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.runtime.objective import LOSS_WEIGHT_RULES, LossWeight
from lightning_roundpipe.runtime.placement import HOST_WEIGHTS

__all__ = ["Arguments", "checked_arguments"]

_WIRE_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `RoundPipeStrategy` (see there), with names resolved and defaults filled in.

    Attributes:
        replica_groups: None for ``"auto"``.
        chunked_loss: ``"auto"`` for True, None for False.
        compile_options: arguments of `torch.compile`; None not to compile.
    """

    num_microbatches: int | str
    units: str | Sequence[str]
    loss_weight: LossWeight
    optimizer_overlap: str
    workers_per_device: int
    split_rules: Mapping[str, int | str]
    gpu_memory_limit: float
    plan: str
    replica_groups: int | None
    recompute: str
    compile_options: Mapping[str, Any] | None
    show_plan: bool
    chunked_loss: str | None
    sequence_tiles: Mapping[str, int]
    upload_on_call: Sequence[str]
    host_weights: str
    save_frozen_weights: bool
    process_group_backend: str
    timeout: timedelta
    gradient_wire_dtype: torch.dtype | None
    shard_optimizer_state: bool


def checked_arguments(
    *,
    num_microbatches: Any,
    units: Any,
    loss_weight: Any,
    optimizer_overlap: Any,
    workers_per_device: Any,
    split_rules: Any,
    gpu_memory_limit: Any,
    plan: Any,
    replica_groups: Any,
    recompute: Any,
    compile_units: Any,
    show_plan: Any,
    chunked_loss: Any,
    sequence_tiles: Any,
    upload_on_call: Any,
    host_weights: Any,
    save_frozen_weights: Any,
    process_group_backend: Any,
    timeout: Any,
    gradient_wire_dtype: Any,
    shard_optimizer_state: Any,
) -> Arguments:
    """What the arguments of `RoundPipeStrategy` say.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: it is not of the right kind.
        PlanError: a plan in a file does not go with another argument.
    """
    if num_microbatches != "auto" and not _is_count(num_microbatches):
        raise ValueError(
            f"`num_microbatches` must be 'auto' or an integer of at least 1, but got {num_microbatches!r}."
        )
    if not _is_count(workers_per_device):
        raise ValueError(f"`workers_per_device` must be an integer of at least 1, but got {workers_per_device!r}.")
    if not isinstance(gpu_memory_limit, int | float) or not 0 < gpu_memory_limit <= 1:
        raise ValueError(
            f"`gpu_memory_limit` is a share of the free memory, above 0 and at most 1, but got {gpu_memory_limit!r}."
        )
    if not isinstance(units, str) and not all(isinstance(unit, str) for unit in units):
        raise ValueError(f"`units` must be 'auto' or a list of class names and dotted paths, but got {units!r}.")
    if split_rules is not None and not (
        isinstance(split_rules, Mapping) and all(isinstance(key, str) for key in split_rules)
    ):
        raise ValueError(
            "`split_rules` must map keys or dotted paths (for a tuple: '0', '1') to a dim or 'replicate', but got"
            f" {split_rules!r}."
        )
    if optimizer_overlap is False:
        optimizer_overlap = "off"  # What YAML makes of an unquoted `off`.
    if optimizer_overlap not in ("off", "exact", "stale"):
        raise ValueError(f"`optimizer_overlap` must be 'off', 'exact' or 'stale', but got {optimizer_overlap!r}.")
    if replica_groups != "auto" and not _is_count(replica_groups):
        raise ValueError(f"`replica_groups` must be 'auto' or an integer of at least 1, but got {replica_groups!r}.")
    if plan != "auto" and replica_groups != 1:
        raise ValueError(
            f"A plan in a file has its number of replica groups, but got `replica_groups={replica_groups!r}` beside"
            f" `plan={str(plan)!r}`. Leave it out."
        )
    if recompute not in ("auto", "all", "none"):
        raise ValueError(f"`recompute` must be 'auto', 'all' or 'none', but got {recompute!r}.")
    if plan != "auto" and recompute != "auto":
        raise PlanError(
            f"A plan in a file says what is recomputed, but got `recompute={recompute!r}` beside"
            f" `plan={str(plan)!r}`. Leave it out."
        )
    if not isinstance(compile_units, bool | Mapping):
        raise TypeError(
            f"`compile_units` must be True, False or a mapping of arguments of `torch.compile`, but got"
            f" {compile_units!r}."
        )
    if units != "auto" and not units:
        raise ValueError(f"`units` must be 'auto' or name at least one module, but got {units!r}.")
    if not isinstance(chunked_loss, bool) and chunked_loss not in KERNELS:
        raise ValueError(f"`chunked_loss` must be a bool or one of {', '.join(KERNELS)}, but got {chunked_loss!r}.")
    if chunked_loss == "liger" and not liger_is_installed():
        raise ValueError("`chunked_loss='liger'` needs Liger's kernels. Run `pip install liger-kernel`.")
    if sequence_tiles is not None and not (
        isinstance(sequence_tiles, Mapping) and all(_is_count(tile) for tile in sequence_tiles.values())
    ):
        raise ValueError(
            f"`sequence_tiles` must map class names to numbers of positions of at least 1, but got {sequence_tiles!r}."
        )
    if upload_on_call is not None and (
        isinstance(upload_on_call, str) or not all(isinstance(name, str) for name in upload_on_call)
    ):
        raise ValueError(f"`upload_on_call` must be a list of class names, but got {upload_on_call!r}.")
    if host_weights not in HOST_WEIGHTS:
        raise ValueError(
            f"`host_weights` must be one of {', '.join(map(repr, HOST_WEIGHTS))}, but got {host_weights!r}."
        )
    if gradient_wire_dtype not in _WIRE_DTYPES:
        raise ValueError(
            f"`gradient_wire_dtype` must be None, 'float32' or 'bfloat16', but got {gradient_wire_dtype!r}."
        )
    if not isinstance(timeout, timedelta):
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"`timeout` must be a number of seconds or a timedelta, but got {timeout!r}.")
        timeout = timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(f"`timeout` must be more than 0 seconds, but got {timeout}.")
    return Arguments(
        num_microbatches=num_microbatches,
        units=units,
        loss_weight=_resolve_loss_weight(loss_weight),
        optimizer_overlap=optimizer_overlap,
        workers_per_device=workers_per_device,
        split_rules=dict(split_rules or {}),
        gpu_memory_limit=gpu_memory_limit,
        plan=os.fspath(plan),
        replica_groups=None if isinstance(replica_groups, str) else replica_groups,
        recompute=recompute,
        compile_options={} if compile_units is True else compile_units or None,
        show_plan=show_plan,
        chunked_loss="auto" if chunked_loss is True else chunked_loss or None,
        sequence_tiles=dict(sequence_tiles or {}),
        upload_on_call=list(upload_on_call or []),
        host_weights=host_weights,
        save_frozen_weights=save_frozen_weights,
        process_group_backend=process_group_backend,
        timeout=timeout,
        gradient_wire_dtype=_WIRE_DTYPES[gradient_wire_dtype],
        shard_optimizer_state=bool(shard_optimizer_state),
    )


def _resolve_loss_weight(loss_weight: str | Callable[[Any], float]) -> LossWeight:
    if callable(loss_weight) or loss_weight in LOSS_WEIGHT_RULES:
        return loss_weight
    if not isinstance(loss_weight, str) or "." not in loss_weight:
        raise ValueError(
            f"`loss_weight` must be one of {', '.join(map(repr, LOSS_WEIGHT_RULES))}, a function or its import path,"
            f" but got {loss_weight!r}."
        )
    module, _, name = loss_weight.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"`loss_weight={loss_weight!r}` is taken for the import path of a function, but can not be imported:"
            f" {error}."
        ) from error
    if not callable(function):
        raise TypeError(f"`loss_weight` must name a function, but {loss_weight!r} is a {type(function).__name__}.")
    weight: LossWeight = function
    return weight


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
