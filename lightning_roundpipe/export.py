"""Hugging Face checkpoints (sharded safetensors, a configuration) from a module or from a Lightning checkpoint."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.checkpoint_io import load_sharded
from lightning_roundpipe.exceptions import WeightFileError
from lightning_roundpipe.hf_layout import is_transformers_model, plan_load, plan_save
from lightning_roundpipe.loading import load_pretrained
from lightning_roundpipe.runtime.weight_files import TensorSpec, WeightFiles, write_weights

__all__ = ["convert_for_mapping", "export_checkpoint", "export_pretrained", "parse_bytes", "weights_of"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text like ``"5GB"`` (powers of 1000, as transformers counts).

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(size).strip().upper())
    if match is None or match.group(2) not in _UNITS or float(match.group(1)) <= 0:
        raise ValueError(f"A size must be a number of bytes, or text like '5GB', but got {size!r}.")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def export_pretrained(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a module's weights, and its configuration if it has one, so that ``from_pretrained`` reads them.

    Works after a fit and between two batches of one; needs host memory for one tensor besides the model, whatever the
    conversion. Files that are replaced stay valid for whoever has them mapped.

    Args:
        module: a transformers model, or any module; not a `LightningModule` around it, whose keys have a prefix. For a
            model with adapters, merge them first (``merge_and_unload``), or save the adapters alone with peft's
            ``save_pretrained``.
        folder: where to write; it is made.
        dtype: for floating-point weights; None for their own.
        max_shard_size: size of a file.
        state_dict: values to write instead of the module's own, under the same names.

    Raises:
        ValueError: the module has adapters that are not merged, or ``max_shard_size`` is no size.
    """
    limit = parse_bytes(max_shard_size)
    names = state_dict if state_dict is not None else module.state_dict()
    if adapters := [name for name in names if ".lora_" in name or ".base_layer." in name]:
        raise ValueError(
            f"The model has adapters (`{adapters[0]}`), which a plain checkpoint has no place for. Merge them first"
            " (`model = model.merge_and_unload()`), or save them alone with `model.save_pretrained(folder)`."
        )
    state = {name: tensor.detach() for name, tensor in names.items() if isinstance(tensor, Tensor)}
    specs, tensors = plan_save(module, state, dtype)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path, specs, tensors, limit)
    if is_transformers_model(module):
        _save_config(module, path, dtype)


def convert_for_mapping(
    module: nn.Module,
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a checkpoint anew as the module wants it, once, so that `load_pretrained` can map all of it.

    Weights can not be mapped where files have them in another dtype, or in another layout: the experts of a mixture,
    which transformers keeps in one tensor for each layer, and files one by one. This takes host memory for one layer,
    and a disk for the weights again.

    Args:
        module: the module that the checkpoint is of, in the dtype that is wanted; it may be on the meta device, and is
            not changed.
        path: see `load_pretrained`.
        folder: where to write; it is made. Configuration and tokenizer files are taken along.
        rename: see `load_pretrained`.
        max_shard_size: size of a file.

    Raises:
        WeightFileError: files are missing or damaged; or keys are missing or unexpected.
        ValueError: ``max_shard_size`` is no size.
    """
    limit = parse_bytes(max_shard_size)
    files = WeightFiles(path)
    state = module.state_dict(keep_vars=True)
    plan = plan_load(module, files, state, rename)
    there = {id(state[name]) for name in plan.plain}
    converted = [] if not plan.converted else [name for name in state if id(state[name]) not in there]
    missing = [] if converted else [n for n, t in state.items() if id(t) not in there and not plan.optional(n)]
    if missing or plan.unexpected:
        raise WeightFileError(
            f"The weights in {files.path} are not those of this {type(module).__name__}: missing"
            f" {', '.join(missing[:5]) or 'nothing'}, unexpected {', '.join(plan.unexpected[:5]) or 'nothing'}."
        )
    wanted = {name: TensorSpec(state[name].dtype, state[name].shape) for name in (*plan.plain, *converted)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, stored in sorted(plan.plain.items(), key=lambda item: (item[1].file.path, item[1].start)):
            yield name, stored.map()
        for convert, _ in plan.converted:
            made = convert()
            for name in list(made):
                yield name, made.pop(name)

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    try:
        write_weights(target, wanted, tensors(), limit)
    except ValueError as error:
        raise WeightFileError(f"The weights in {files.path} do not fit the module: {error}") from error
    source = Path(path)
    _take_along(source if source.is_dir() else source.parent, target)


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    config = model.config
    before = config.architectures
    kept = getattr(config, "dtype", None)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    try:
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    finally:
        config.architectures, config.dtype = before, kept


def weights_of(checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> dict[str, Tensor]:
    """The weights in a Lightning checkpoint, memory-mapped where it is one file.

    Args:
        checkpoint: the file, or the folder of a sharded one.
        trusted: whether reading it may run code.

    Raises:
        ValueError: it is not there, or is no checkpoint, or needs to be trusted.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise ValueError(f"The checkpoint {path} does not exist.")
    if path.is_dir():
        content = load_sharded(path, keys={"state_dict"})
    else:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
        except UnpicklingError as error:
            raise ValueError(
                f"The checkpoint {path} holds objects besides tensors, which only code can make. If you trust where it"
                " comes from, pass `trusted=True` (`--trusted` on the command line)."
            ) from error
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise ValueError(f"{path} is not a Lightning checkpoint: it has no `state_dict`.")
    return dict(content["state_dict"])


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    model: str | os.PathLike[str] | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    trusted: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> str:
    """Turn a Lightning checkpoint into a Hugging Face one. Weights go from file to file, one tensor at a time.

    Args:
        checkpoint: the file, or the folder of a sharded one.
        model: folder with the ``config.json`` of a causal language model, or a function that builds the module (it is
            called under the meta device). A folder may hold weights, too: they stand in for frozen ones that the
            checkpoint leaves out, and tokenizer files are taken along.
        folder: where to write.
        prefix: of the model's keys in the checkpoint (``"model."`` for ``self.model``); found if not given.
        trusted: whether the checkpoint may run code when it is read, as one with objects in its hyperparameters must.
        dtype: for floating-point weights; None for those of the checkpoint.
        max_shard_size: size of a file.

    Returns:
        The prefix.

    Raises:
        ValueError: the checkpoint does not hold the model's weights under this or any prefix.
    """
    state = weights_of(checkpoint, trusted=trusted)
    source = None if callable(model) else Path(model)

    def build() -> nn.Module:
        with torch.device("meta"):
            return model() if callable(model) else _causal_lm(model)

    built = build()
    found, prefix = _under_prefix(state, list(built.state_dict()), prefix, checkpoint)
    if missing := [name for name in built.state_dict() if name not in found]:
        found |= _from_files(build(), source, missing, checkpoint)
    export_pretrained(built, folder, dtype=dtype, max_shard_size=max_shard_size, state_dict=found)
    if source is not None:
        _take_along(source, Path(folder))
    return prefix


def _causal_lm(path: str | os.PathLike[str]) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Exporting by a configuration needs transformers. Run `pip install lightning-roundpipe[hf]`."
        ) from error
    if not Path(path).exists():
        raise ValueError(
            f"`model` must be a folder with a config.json, or such a file, but {str(path)!r} is not there."
        )
    make: Callable[[Any], nn.Module] = AutoModelForCausalLM.from_config
    return make(AutoConfig.from_pretrained(path))


def _under_prefix(
    state: Mapping[str, Tensor], names: Sequence[str], prefix: str | None, checkpoint: str | os.PathLike[str]
) -> tuple[dict[str, Tensor], str]:
    """The tensors of the model in a checkpoint of a module around it, by the model's own names."""
    if prefix is None:
        ends = Counter(key[: -len(name)] for key in state for name in names if key.endswith(name))
        # The shortest of the best: `model.` also ends in what comes before `layers` in a model of the same name.
        prefix = min(ends, key=lambda start: (-ends[start], len(start)), default="")
    found = {name: state[prefix + name] for name in names if prefix + name in state}
    if not found:
        raise ValueError(
            f"The checkpoint {checkpoint} holds no weights of the model under the prefix {prefix!r}; its keys are like"
            f" `{next(iter(state), '')}`, the model's like `{names[0]}`. Give the `prefix`, or another model."
        )
    return found, prefix


def _from_files(
    model: nn.Module, source: Path | None, missing: Sequence[str], checkpoint: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """Weights that a checkpoint leaves out, because they were frozen, from the files that they came from."""
    try:
        if source is None:
            raise WeightFileError("`model` is not a folder with weights.")
        load_pretrained(model, source, progress=False)
    except WeightFileError as error:
        raise ValueError(
            f"The checkpoint {checkpoint} lacks {len(missing)} of the model's weights, such as `{missing[0]}`, and they"
            f" can not be taken from files beside the configuration: {error} Pass a folder that holds the weights which"
            " the training began with, or another prefix."
        ) from error
    state = model.state_dict()
    return {name: state[name] for name in missing}


def _take_along(source: Path, folder: Path) -> None:
    """Copy what belongs to a model besides its weights: tokenizer, processor, chat template."""
    if not source.is_dir():
        return
    for file in sorted(source.iterdir()):
        wanted = file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith(".index.json")
        if wanted and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
