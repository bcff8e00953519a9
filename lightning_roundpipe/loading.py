"""Weights from safetensors files, with one copy of them in memory at any moment.

In ``configure_model``, or under ``trainer.init_module(empty_init=True)``::

    def configure_model(self):
        if self.model is None:
            with empty_parameters():
                self.model = AutoModelForCausalLM.from_config(config)
            load_pretrained(self.model, folder)
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_roundpipe.exceptions import WeightFileError
from lightning_roundpipe.hf_layout import is_transformers_model, plan_load
from lightning_roundpipe.runtime.weight_files import StoredTensor, WeightFiles

__all__ = ["empty_parameters", "load_pretrained"]

_log = logging.getLogger(__name__)


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that are built inside have parameters without memory (on the meta device), and buffers with values.

    Buffers that no checkpoint holds (rotary frequencies, masks) are computed when a module is built, which is why not
    everything may be on the meta device.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        known = module._parameters[name]
        if known is not None and not known.is_meta:
            empty = type(known)(known.data.to("meta"), requires_grad=known.requires_grad)
            empty.__dict__.update(known.__dict__)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
    mmap: bool = True,
    progress: bool = True,
) -> tuple[list[str], list[str]]:
    """Load the weights of a safetensors checkpoint into a module that may be on the meta device.

    Every tensor keeps the module's dtype, as with ``load_state_dict``. Those that lie in the files as the module wants
    them are mapped: their pages are read when they are first needed, or go straight to where `RoundPipeStrategy` keeps
    weights. Others are read now, one after another, into their final memory. Tensors that a transformers model has in
    another layout than its files (the experts of a layer in one tensor) are converted layer by layer.

    Args:
        module: the module that the checkpoint is of; for a `LightningModule` around it, pass the inner one.
        path: a folder in the layout of ``save_pretrained``, a safetensors file or an index of such files.
        rename: gives the module's name for a stored name, or None to leave that tensor out. By default names are equal,
            but for models of transformers, which know what they are called in files.
        strict: whether missing and unexpected keys are an error.
        mmap: whether to map what can be mapped. The files must then stay as they are while the weights are in use;
            replacing them (as `export_pretrained` does) is harmless, writing into them is not.
        progress: whether to show a progress bar.

    Returns:
        Missing and unexpected keys; empty if ``strict``.

    Raises:
        WeightFileError: files are missing or damaged; keys are missing or unexpected; a shape differs; or something is
            left on the meta device that no file holds.
    """
    files = WeightFiles(path)
    state = module.state_dict(keep_vars=True)
    plan = plan_load(module, files, state, rename)
    writer = _Writer(module, mmap)
    _check_shapes(plan.plain, state, files)
    found = set(plan.plain)
    total = sum(stored.num_bytes for stored in plan.plain.values()) + sum(size for _, size in plan.converted)
    # tqdm's monitor thread would outlive the bar.
    with (
        torch.no_grad(),
        tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        # In the order of the files, which disks and network file systems like.
        for name, stored in sorted(plan.plain.items(), key=lambda item: (item[1].file.path, item[1].start)):
            writer.take(name, stored)
            bar.update(stored.num_bytes)
        for convert, size in plan.converted:
            made = convert()
            for name in list(made):
                if name not in state or made[name].shape != state[name].shape:
                    have = list(state[name].shape) if name in state else "nothing"
                    raise WeightFileError(
                        f"Converting weights of {files.path} gave `{name}` of shape {list(made[name].shape)}, but the"
                        f" model has {have} there. Is the checkpoint one of this model?"
                    )
                writer.take(name, made.pop(name))
                found.add(name)
            bar.update(size)
    loaded = {id(writer.current(name)) for name in found}
    missing = [name for name in state if id(writer.current(name)) not in loaded and not plan.optional(name)]
    if strict and (missing or plan.unexpected):
        raise WeightFileError(
            f"The weights in {files.path} are not those of this {type(module).__name__}:"
            + (f" missing {_listed(missing)};" if missing else "")
            + (f" unexpected {_listed(plan.unexpected)};" if plan.unexpected else "")
            + " check the configuration, give `rename`, or pass `strict=False` to go on without them."
        )
    _fill_buffers(module)
    _check_complete(module, missing)
    _log.debug("mapped %d bytes, read %d bytes", writer.mapped_bytes, writer.read_bytes)
    return missing, plan.unexpected


class _Writer:
    """Puts values into a module: under the same `nn.Parameter` where it has memory, under a new one on meta."""

    def __init__(self, module: nn.Module, mmap: bool) -> None:
        self.mmap = mmap
        self.mapped_bytes = self.read_bytes = 0
        self._owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, inner in module.named_modules(remove_duplicate=False):
            for table in (inner._parameters, inner._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._places[f"{prefix}.{name}" if prefix else name] = table, name
                        owners = self._owners.setdefault(id(tensor), [])
                        if not any(known is table and key == name for known, key in owners):
                            owners.append((table, name))

    def current(self, name: str) -> Tensor:
        """The module's tensor of that name, now."""
        table, key = self._places[name]
        tensor: Tensor = table[key]
        return tensor

    def take(self, name: str, source: StoredTensor | Tensor) -> None:
        """Give the tensor of that name the values of ``source``."""
        target = self.current(name)
        is_parameter = isinstance(target, nn.Parameter)
        # A buffer is written in steps, a file is not; and buffers are small.
        maps = self.mmap and is_parameter and isinstance(source, StoredTensor) and source.dtype is target.dtype
        if maps:
            assert isinstance(source, StoredTensor)
            value = source.map()
            self.mapped_bytes += source.num_bytes
        elif isinstance(source, StoredTensor):
            self.read_bytes += source.num_bytes
            if not target.is_meta:
                source.read_into(target)
                return
            value = source.read(target.dtype)
        elif target.is_meta:
            value = source.to(target.dtype).contiguous()
        else:
            target.copy_(source)
            return
        if not target.is_meta:
            target.data = value
            return
        new = nn.Parameter(value, requires_grad=target.requires_grad) if is_parameter else value
        if is_parameter:
            new.__dict__.update(target.__dict__)
        owners = self._owners.pop(id(target))
        for table, key in owners:
            table[key] = new
        self._owners[id(new)] = owners


def _check_shapes(plain: dict[str, StoredTensor], state: dict[str, Any], files: WeightFiles) -> None:
    wrong = [name for name, stored in plain.items() if stored.shape != state[name].shape]
    if wrong:
        first = wrong[0]
        raise WeightFileError(
            f"The weights in {files.path} have other shapes than the model: `{first}` is {list(plain[first].shape)} in"
            f" the files and {list(state[first].shape)} in the model"
            + (f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else "")
            + ". Use the configuration that the weights were trained with."
        )


def _fill_buffers(module: nn.Module) -> None:
    """Compute the buffers on the meta device that no file holds, where transformers knows how."""
    for model in [inner for inner in module.modules() if is_transformers_model(inner)]:
        for inner in model.modules():
            empty = [name for name, buffer in inner._buffers.items() if buffer is not None and buffer.is_meta]
            if not empty or next(inner.parameters(recurse=False), None) is not None:
                continue
            for name in empty:
                buffer = inner._buffers[name]
                assert buffer is not None
                inner._buffers[name] = torch.full_like(buffer, _UNSET, device="cpu")
            model._init_weights(inner)  # type: ignore[operator]
            for name in empty:
                buffer = inner._buffers[name]
                assert buffer is not None
                if bool((buffer == _UNSET).all()):
                    inner._buffers[name] = buffer.to("meta")  # It did not: told of below.


_UNSET = 77
"""No buffer is computed to hold this everywhere."""


def _check_complete(module: nn.Module, missing: Sequence[str]) -> None:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta and name not in missing]
    if left:
        raise WeightFileError(
            f"No file holds {_listed(left)}, which are on the meta device. Build the module under"
            " `lightning_roundpipe.loading.empty_parameters()` instead of `torch.device('meta')`: buffers then have"
            " their values."
        )


def _listed(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
