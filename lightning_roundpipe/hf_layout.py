"""Between the layout of a transformers model and that of its checkpoints.

They differ: a prefix comes or goes, names of older versions live on in files, and newer versions of transformers keep
the experts of a layer in one tensor that files hold one by one. transformers knows how; here it is asked for one group
of tensors at a time, so that a conversion never needs memory for more than a layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.runtime.weight_files import StoredTensor, TensorSpec

__all__ = ["LoadPlan", "is_transformers_model", "plan_load", "plan_save"]


def is_transformers_model(module: nn.Module) -> bool:
    """Whether ``module`` is a model of transformers, found without importing it."""
    return any(
        cls.__module__ == "transformers.modeling_utils" and cls.__name__ == "PreTrainedModel"
        for cls in type(module).__mro__
    )


# ---------------------------------------------------------------------------------------------------------- loading


@dataclass
class LoadPlan:
    """Which stored tensors become which of the module's.

    Attributes:
        plain: the stored tensor that is the module's tensor of that name.
        converted: functions that make several of the module's tensors, by name, each from the stored ones it needs;
            with the number of bytes that it reads.
        unexpected: stored names that the module has no place for.
        optional: matches names of the module that files need not hold.
    """

    plain: dict[str, StoredTensor] = field(default_factory=dict)
    converted: list[tuple[Callable[[], dict[str, Tensor]], int]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    optional: Callable[[str], bool] = lambda name: False


def plan_load(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, Any],
    rename: Callable[[str], str | None] | None,
) -> LoadPlan:
    """Decide where stored tensors go.

    Args:
        module: what to load into.
        stored: what there is.
        names: the module's state dict.
        rename: the module's name for a stored name, or None to leave it out; None for what transformers does with its
            own models, and for equal names elsewhere.
    """
    plan = LoadPlan()
    if rename is None and is_transformers_model(module):
        _plan_transformers(module, stored, names, plan)
        return plan
    for name, tensor in stored.items():
        target = name if rename is None else rename(name)
        if target is not None and target in names:
            plan.plain[target] = tensor
        elif target is not None:
            plan.unexpected.append(name)
    return plan


def _plan_transformers(
    model: Any, stored: Mapping[str, StoredTensor], names: Mapping[str, Any], plan: LoadPlan
) -> None:
    prefix = model.base_model_prefix
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers before 5: names differ by the prefix at most.
        for name, tensor in stored.items():
            target = next((n for n in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if n in names), None)
            if target is None:
                plan.unexpected.append(name)
            else:
                plan.plain[target] = tensor
    else:
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        groups: dict[str, tuple[Any, list[StoredTensor]]] = {}
        # In their natural order: converters stack experts in the order in which they come.
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, dict(names))
            if target not in names and name in names:
                target, pattern = name, None
            if target not in names:
                plan.unexpected.append(name)
            elif pattern is None:
                plan.plain[target] = stored[name]
            else:
                converter, parts = groups.setdefault(target, (deepcopy(converter_of[pattern]), []))
                converter.add_tensor(target, name, pattern, stored[name].read)
                parts.append(stored[name])
        for target, (converter, parts) in groups.items():
            plan.converted.append((_conversion(converter, target, model), sum(part.num_bytes for part in parts)))
        # What `save_pretrained` must do backwards later.
        model._weight_conversions = [entry for entry in mapping if entry.was_used()] if mapping else mapping
    buffers = [name for name, _ in model.named_buffers()]
    ignored = list(model._keys_to_ignore_on_load_unexpected or ())
    # Older models stored these for every layer.
    ignored += [
        rf"{last}$"
        for last in (r"rotary_emb\.inv_freq", "position_ids")
        if any(b.endswith(last.replace("\\", "")) for b in buffers)
    ]
    plan.unexpected = [name for name in plan.unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    missing = list(model._keys_to_ignore_on_load_missing or ())
    plan.optional = lambda name: any(re.search(pattern, name) for pattern in missing)


def _conversion(converter: Any, target: str, model: Any) -> Callable[[], dict[str, Tensor]]:
    def convert() -> dict[str, Tensor]:
        made = converter.convert(target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    return convert


# ---------------------------------------------------------------------------------------------------------- saving


def plan_save(
    module: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, TensorSpec], Iterator[tuple[str, Tensor]]]:
    """The tensors of a checkpoint: what they will be, and an iterator that makes them one after another.

    Args:
        module: decides the layout.
        state: its state dict, or one like it; tied weights are stored once.
        dtype: for floating-point tensors; None for their own.
    """
    state = _without_ties(module, state)
    if not is_transformers_model(module):
        return {name: _spec(tensor, dtype) for name, tensor in state.items()}, iter(state.items())
    ignored = list(getattr(module, "_keys_to_ignore_on_save", None) or ())
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    converted = _revert(module, shapes)
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(_layer_of(name), []).append(name)
    apart: dict[str, Tensor] = {}
    for names in groups.values():
        apart |= _revert(module, {name: shapes[name] for name in names})
    if _shapes(apart) != _shapes(converted):  # A conversion that reaches across layers.
        groups = {"": list(state)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for names in groups.values():
            yield from _revert(module, {name: state[name] for name in names}).items()

    return {name: _spec(tensor, dtype) for name, tensor in converted.items()}, tensors()


def _revert(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers before 5 keeps the layout of the files.
        return state
    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted


def _layer_of(name: str) -> str:
    """The part of a name up to the number of its layer; what is in no layer is on its own."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _spec(tensor: Tensor, dtype: torch.dtype | None) -> TensorSpec:
    return TensorSpec(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape)


def _without_ties(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for each tensor: of tied ones the name that the model ties the others to, else the first."""
    declared = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ()
    by_place: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        known = by_place.get(place)
        if known is None or (known in declared and name not in declared):
            by_place[place] = name
    kept = set(by_place.values())
    return {name: tensor for name, tensor in state.items() if name in kept}
