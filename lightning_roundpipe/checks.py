"""What is looked at before the first step: a clear refusal then is better than a wrong number later."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parameter import is_lazy

from lightning_roundpipe.quantised import refuse_hidden_quantisation

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["check_devices", "check_module", "check_optimizers", "check_training", "listed"]


def check_devices(root_device: torch.device, num_devices: int) -> None:
    """Refuse devices that no worker can be; tell of GPUs that are left out.

    Args:
        root_device: the first worker's.
        num_devices: number of devices.

    Raises:
        MisconfigurationException: the kind of device is not supported.
    """
    if root_device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(
            f"RoundPipeStrategy runs on GPUs (CUDA) or on virtual CPU workers, but the device is"
            f" {root_device}. Use `Trainer(accelerator='gpu')` or `Trainer(accelerator='cpu')`."
        )
    visible = torch.cuda.device_count() if root_device.type == "cuda" else 0
    if _IS_INTERACTIVE and visible > num_devices:
        # In a notebook Lightning takes `devices="auto"` for one GPU, because other strategies start processes.
        rank_zero_info(f"{visible} GPUs are visible; `Trainer(devices={visible})` uses them all.")


def check_module(module: "LightningModule") -> None:
    """Refuse models whose weights can not be streamed.

    Raises:
        ValueError: it says why.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(
            f"All parameters must have shapes before training, but these are not initialised: {listed(lazy)}. Run"
            " a forward pass in `setup` or `configure_model`."
        )
    if any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules()):
        raise ValueError(
            "Scripted modules (`torch.jit.script`) read their parameters where nobody can supply others. Use the"
            " original module."
        )
    if missing := [name for name, tensor in tensors if tensor.is_meta]:
        raise ValueError(
            f"All parameters and buffers must have values before training, but these are on the meta device:"
            f" {listed(missing)}. Load or initialise them in `configure_model` (for example"
            " `module.to_empty(device='cpu')`, then load a state dict)."
        )
    if moved := [name for name, tensor in tensors if tensor.device.type != "cpu"]:
        raise ValueError(
            f"Weights stay in host memory under RoundPipeStrategy, but these are elsewhere: {listed(moved)}. Build"
            " the model on the CPU, and do not move it."
        )
    refuse_hidden_quantisation(module)


def check_training(module: "LightningModule", num_microbatches: int | str, num_workers: int) -> None:
    """Refuse, or warn of, what does not go with batches that are split.

    Raises:
        MisconfigurationException: it says why.
    """
    if not module.automatic_optimization:
        _check_manual_optimization(num_microbatches, num_workers)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "RoundPipeStrategy splits each batch into micro-batches, which a `training_step(dataloader_iter)` does"
            " not allow. Take `(batch, batch_idx)` instead."
        )
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    split = num_microbatches != 1 and module.automatic_optimization
    if split and any(isinstance(inner, batch_norm) for inner in module.modules()):
        rank_zero_warn(
            "The model has batch normalisation: its statistics are those of each micro-batch, in their order, not"
            " of the whole batch. `RoundPipeStrategy(num_microbatches=1)` keeps whole batches."
        )


def check_optimizers(module: "LightningModule", optimizers: Sequence[Any]) -> None:
    """Refuse optimizers over parameters that are not the module's.

    Raises:
        MisconfigurationException: there are such parameters.
    """
    known = {id(parameter) for parameter in module.parameters()}
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    foreign = [list(p.shape) for group in groups for p in group["params"] if id(p) not in known]
    if foreign and module.automatic_optimization:
        raise MisconfigurationException(
            f"The optimizer holds {len(foreign)} parameter(s) that the LightningModule does not (of shape"
            f" {', '.join(map(str, foreign[:5]))}): a copy of the model, or tensors in a plain list. They would not"
            " be trained. Register them (`self.model = ...`, `nn.ParameterList`), and make the optimizer from"
            " `self.parameters()`."
        )


def _check_manual_optimization(num_microbatches: int | str, num_workers: int) -> None:
    if num_microbatches not in ("auto", 1):
        raise MisconfigurationException(
            "With manual optimization (`automatic_optimization = False`) `training_step` steps optimizers itself,"
            f" so it must run once for each batch, but got `num_microbatches={num_microbatches}`. Use"
            " `RoundPipeStrategy(num_microbatches=1)`, or automatic optimization."
        )
    if num_workers > 1:
        rank_zero_info(
            f"With manual optimization a batch is not split: one of the {num_workers} workers does all"
            " training steps. The others take part in validation, test and predict."
        )


def listed(names: Sequence[str], limit: int = 5) -> str:
    """The first ``names``, for a message."""
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
