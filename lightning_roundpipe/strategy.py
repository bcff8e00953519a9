"""`RoundPipeStrategy`: Lightning's calls, answered by the runtime. No algorithm lives here."""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import move_data_to_device, rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_roundpipe.chunked_loss import KERNELS, chunked_causal_lm_loss, liger_is_installed
from lightning_roundpipe.exceptions import PlanError
from lightning_roundpipe.fence import UpdateFence, what_looks_between_steps
from lightning_roundpipe.fused_kernels import FusedKernels
from lightning_roundpipe.module_view import ModuleViews
from lightning_roundpipe.overlap import (
    clears_or_reads_spent_gradients,
    hooks_between_steps,
    reason_against_overlap,
)
from lightning_roundpipe.plan.files import save_schedule
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.timeline import Timeline
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.publish import add_gradients, publish_gradients
from lightning_roundpipe.quantised import refuse_hidden_quantisation
from lightning_roundpipe.runtime.executor import Executor, StepResult, largest_unit_bytes
from lightning_roundpipe.runtime.hazards import switched_off
from lightning_roundpipe.runtime.manual_run import ManualRun
from lightning_roundpipe.runtime.microbatch import MicroBatch, merge, split
from lightning_roundpipe.runtime.objective import LOSS_WEIGHT_RULES, BatchObjective, LossWeight
from lightning_roundpipe.runtime.partial_step import PartialStepper, reason_against_parts
from lightning_roundpipe.runtime.planning import (
    TrainingPlanner,
    evaluation_schedule,
    given_schedule,
    measured_machine,
)
from lightning_roundpipe.runtime.randomness import counted_seed
from lightning_roundpipe.runtime.stats import StepStats
from lightning_roundpipe.runtime.units import find_units
from lightning_roundpipe.runtime.updater import UpdateRequest
from lightning_roundpipe.runtime.worker import Worker
from lightning_roundpipe.sequence_tiles import tiled_over_the_sequence
from lightning_roundpipe.step_log import StepLog
from lightning_roundpipe.summary import FirstStepSummary, executor_rows, schedule_rows, update_text

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["RoundPipeStrategy"]

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_CHECKPOINT_KEY = "roundpipe"
_STEP_KINDS = ("training", "validation", "test", "predict")
# Enough for stages to overlap on a few workers, and independent of their number as long as that is small.
_AUTO_MICROBATCHES = 4


class RoundPipeStrategy(ParallelStrategy):
    """Trains a model whose weights, gradients and optimizer state stay in host memory.

    The model is cut into units (its layers). Each batch is split into micro-batches, and a thread per micro-batch runs
    the ordinary ``training_step``; every call of a unit runs on the worker (GPU, or virtual CPU device) of its stage,
    with weights that are uploaded for it. Stages are dealt to the workers round-robin. The numbers equal those of plain
    training on the whole batch.

    ``Trainer(devices=N)`` gives N workers in one process.

    Args:
        num_microbatches: into how many micro-batches to split each batch; ``"auto"``: 4, or the number of workers if
            that is larger. There are never more than samples.
        units: ``"auto"``, or class names and dotted paths of modules that must be units.
        loss_weight: what a micro-batch's loss counts for in the batch's: ``"samples"``; ``"tokens"``, the labels that
            are not ignored (-100); ``"auto"``, tokens if the batch has labels of which some are ignored, else samples;
            or a function of a micro-batch, or its dotted import path, that returns a weight.
        optimizer_overlap: ``"exact"``: each parameter is updated in the background as soon as its own gradient is
            complete, while the backward pass goes on, and what is left while the next forward pass begins, which waits
            for each layer's update; the same numbers as with ``"off"``, where the optimizer steps when all gradients
            are, as in a plain Trainer. Where something needs all gradients before the update (clipping, loss scaling,
            hooks that look at gradients, optimizers that can not step in parts) that is said once in the log, and the
            optimizer steps afterwards. ``"stale"``: a step computes with weights that lack the update of the step
            before (never an older one), and so need not wait for it: the one-step delay of the RoundPipe paper. It
            takes one more copy of the trained weights and of their gradients. Where something looks at weights between
            steps, none is late; validation, checkpoints and hooks see finished weights.
        workers_per_device: number of workers that share each device.
        split_rules: how to split named parts of a batch whose shape does not tell: key or path (patterns allowed) to
            the dim to split on, or ``"replicate"``.
        gpu_memory_limit: share of the GPU memory that is free at the start which may be used.
        plan: ``"auto"``: stages are cut by bytes at first, and anew, a few times, when it has been measured what calls
            cost; or a JSON file with a plan (see `save_plan` and ``lightning-roundpipe plan --output``).
        replica_groups: groups of workers that each run their own micro-batches through all stages: less idle time for
            more traffic. The last bits of sums of gradients depend on it. ``"auto"``: one at first, then what is
            fastest.
        recompute: which calls of units run again for their backward pass, instead of keeping their graph. ``"auto"``:
            as many as memory asks for, on a GPU that runs all stages, where it is known after some steps; with several,
            as many as the balance of their work asks for. ``"all"``: all but the last, for batches of varying length.
            ``"none"``: none, for a model that fits; each worker then needs micro-batches of its own
            (``replica_groups`` as many as workers).
        compile_units: whether to compile units whose class occurs more than once (the layers of a model): one graph for
            all that are alike. A mapping gives arguments of `torch.compile`. The numbers then agree with eager ones up
            to rounding only. What does not compile runs eagerly, which is said once.
        show_plan: whether to print a picture of each plan.
        chunked_loss: whether causal language models of transformers compute head and loss chunk by chunk in training
            steps that give them labels: memory then grows with a chunk, not with tokens x vocabulary. Their outputs
            hold no logits. True or ``"auto"``: with Liger's fused kernel on GPUs where it is installed, else with this
            package's; ``"liger"``, ``"torch"`` or ``"compiled"`` (this package's, compiled) choose.
        sequence_tiles: for classes of modules that treat every position alike (MLPs), by name, at how many positions to
            work at a time in training steps: ``{"Qwen3MLP": 4096}``. Their inner activations then take the memory of
            one tile, for one more pass over them in the fused stage and in backward stages.
        upload_on_call: class names of units that may not be called at all, as the experts of a mixture that are modules
            in a list: their weights are uploaded when they are called, not ahead, and so not at all without tokens.
        accelerator: see `lightning.pytorch.strategies.Strategy`.
        checkpoint_io: see there.
        precision_plugin: see there; by default what ``Trainer(precision=...)`` says.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: ``loss_weight`` is the import path of something else than a function, or ``compile_units`` is neither
            a flag nor a mapping.

    Source: RoundPipe, arXiv 2604.27085.
    """

    strategy_name = "roundpipe"

    def __init__(
        self,
        num_microbatches: int | str = "auto",
        units: str | list[str] = "auto",
        loss_weight: str | Callable[[Any], float] = "auto",
        optimizer_overlap: str | bool = "exact",
        workers_per_device: int = 1,
        split_rules: dict[str, int | str] | None = None,
        gpu_memory_limit: float = 0.9,
        plan: str | os.PathLike[str] = "auto",
        replica_groups: int | str = 1,
        recompute: str = "auto",
        compile_units: bool | Mapping[str, Any] = False,
        show_plan: bool = False,
        chunked_loss: bool | str = False,
        sequence_tiles: dict[str, int] | None = None,
        upload_on_call: list[str] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        if num_microbatches != "auto" and not _is_count(num_microbatches):
            raise ValueError(
                f"`num_microbatches` must be 'auto' or an integer of at least 1, but got {num_microbatches!r}."
            )
        if not _is_count(workers_per_device):
            raise ValueError(f"`workers_per_device` must be an integer of at least 1, but got {workers_per_device!r}.")
        if not isinstance(gpu_memory_limit, int | float) or not 0 < gpu_memory_limit <= 1:
            raise ValueError(
                "`gpu_memory_limit` is a share of the free memory, above 0 and at most 1, but got"
                f" {gpu_memory_limit!r}."
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
            raise ValueError(
                f"`replica_groups` must be 'auto' or an integer of at least 1, but got {replica_groups!r}."
            )
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
                "`sequence_tiles` must map class names to numbers of positions of at least 1, but got"
                f" {sequence_tiles!r}."
            )
        if upload_on_call is not None and (
            isinstance(upload_on_call, str) or not all(isinstance(name, str) for name in upload_on_call)
        ):
            raise ValueError(f"`upload_on_call` must be a list of class names, but got {upload_on_call!r}.")
        self._upload_on_call = list(upload_on_call or [])
        self._sequence_tiles = dict(sequence_tiles or {})
        self._tiled_classes: set[str] = set()
        self._chunked_loss = "auto" if chunked_loss is True else chunked_loss
        self._num_microbatches = num_microbatches
        self._units = units
        self._loss_weight = _resolve_loss_weight(loss_weight)
        self._optimizer_overlap = optimizer_overlap
        self._update: UpdateRequest | None = None
        self._workers_per_device = workers_per_device
        self._gpu_memory_limit = gpu_memory_limit
        self._split_rules = dict(split_rules or {})
        self._plan = os.fspath(plan)
        self._replica_groups = None if isinstance(replica_groups, str) else replica_groups
        self._recompute = recompute
        self._compile_options = {} if compile_units is True else compile_units or None
        self._show_plan = show_plan
        self._given_schedule: Schedule | None = None
        self._planner: TrainingPlanner | None = None
        self._schedule: Schedule | None = None
        self._num_nodes = 1
        self._executor: Executor | None = None
        self._step_log: StepLog | None = None
        self._labels_shifted: bool | None = None
        self._base_seed: int | None = None
        self._last_seed: int | None = None
        self._step_stats: StepStats | None = None
        self._manual_run: ManualRun | None = None
        self._told: set[str] = set()
        self._steady: dict[int, bool] = {}
        self._fused = FusedKernels()
        self._fence: UpdateFence | None = None
        self._summary: FirstStepSummary | None = None
        self._model_signature: tuple[tuple[int, bool], ...] = ()
        self.poison_masters = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="roundpipe")`` known; called when this package is imported."""
        # LightningCLI passes a bare class path on as a name, which Lightning looks up in lower case.
        for name in (cls.strategy_name, f"lightning_roundpipe.{cls.__name__}".lower()):
            strategy_registry.register(name, cls, description=cls.__name__)

    # ------------------------------------------------------------------ one process, whatever the number of workers

    @property
    def root_device(self) -> torch.device:
        """The first worker's device; ``self.device`` of the LightningModule outside of steps."""
        return self.parallel_devices[0] if self.parallel_devices else _HOST

    @property
    def is_distributed(self) -> bool:
        """False: samplers, tuners and ``sync_dist`` behave as on a single device."""
        return False

    @property
    def world_size(self) -> int:
        """1: there is one process."""
        return 1

    @property
    def global_rank(self) -> int:
        """0: there is one process."""
        return 0

    @property
    def local_rank(self) -> int:
        """0: there is one process."""
        return 0

    @property
    def node_rank(self) -> int:
        """0: there is one process."""
        return 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One replica sees all data."""
        return {"num_replicas": 1, "rank": 0}

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(
                f"RoundPipeStrategy drives the GPUs of one machine, but got `num_nodes={num_nodes}`. Use"
                " `Trainer(num_nodes=1, devices=N)`."
            )
        self._num_nodes = num_nodes

    def set_world_ranks(self) -> None:
        """Refuse a launcher that starts several processes; called when the Trainer is built."""
        environment = self.cluster_environment
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        processes = max(launched, environment.world_size() if environment is not None else 1)
        if processes > 1:
            source = "`WORLD_SIZE` in the environment" if launched > 1 else type(environment).__name__
            raise MisconfigurationException(
                f"RoundPipeStrategy drives all GPUs of a machine from one process, but {source} says that there are"
                f" {processes} processes. Start one process (plain `python`, or `torchrun --nproc-per-node 1`) with"
                " `Trainer(devices=N)`."
            )

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Identity: there is one process."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Identity: there is one process."""
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Identity: there is one process."""
        return obj

    def barrier(self, name: str | None = None) -> None:
        """Nothing to wait for: there is one process."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Identity: there is one process."""
        return decision

    # ------------------------------------------------------------------ precision

    @property
    def precision_plugin(self) -> RoundPipePrecision:
        """The precision plugin; one of Lightning's own is replaced by ours that does the same."""
        return RoundPipePrecision.adopt(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None stays None: Lightning takes it for "the Trainer's `precision` decides".
        self._precision_plugin = None if precision_plugin is None else RoundPipePrecision.adopt(precision_plugin)

    # ------------------------------------------------------------------ life cycle

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build on the host: the model need not fit one GPU."""
        with _EmptyInit(enabled=bool(empty_init)), _HOST, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: "Trainer") -> None:
        """Check the model, make its optimizers and the executor. The model stays where it is, on the host."""
        assert self.accelerator is not None
        assert self.model is not None
        fits = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        module = self._module
        self._check_devices()
        self._check_module(module, fits)
        if fits:
            wanted = self._num_microbatches if isinstance(self._num_microbatches, int) else None
            self._given_schedule = given_schedule(
                self._plan, self._replica_groups, self.num_workers, wanted, self._recompute
            )
        self.model = self.precision_plugin.convert_module(self.model)
        if fits:
            self._steady.clear()
            self._raise_fence(trainer)
            self._add_summary(trainer)
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            self._check_optimizers(module)
            self._choose_kernels()
        self.setup_precision_plugin()
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = self.root_device.type
        if self._base_seed is None:
            self._base_seed = torch.initial_seed() % 2**63
        self._last_seed = self._base_seed  # For checkpoints that are saved after the fit.
        self._step_log = StepLog(module)
        self._executor = self._make_executor(module)

    def _choose_kernels(self) -> None:
        # With a loss scale, fused kernels take it out of the gradients themselves, and clipping is refused.
        if self._module.automatic_optimization and getattr(self.precision_plugin, "scaler", None) is None:
            self._fused.choose(self._module, self.optimizers)

    def _raise_fence(self, trainer: "Trainer") -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self._fence is None:
            self._fence = UpdateFence(self.finish_updates, self._wait_for_updates, self._settle_updates)
        if self._fence not in callbacks:
            callbacks.insert(0, self._fence)

    def _add_summary(self, trainer: "Trainer") -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        # `Trainer(enable_model_summary=False)` leaves its callback out.
        if self._summary is None and any(isinstance(callback, ModelSummary) for callback in callbacks):
            self._summary = FirstStepSummary()
            callbacks.append(self._summary)

    def finish_updates(self) -> None:
        """Wait until no optimizer step is under way: then weights, gradients and optimizer state are those after it.

        Lightning's hooks need not call this. What runs in threads of its own does.

        Raises:
            BaseException: what the optimizer raised.
        """
        if self._executor is not None:
            self._unwrap_zero_grad()
            self._executor.finish_updates()

    def _finish_and_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.finish_updates()
        self._module.zero_grad(*args, **kwargs)

    def _unwrap_zero_grad(self) -> None:
        if vars(self._module).get("zero_grad") == self._finish_and_zero_grad:
            del vars(self._module)["zero_grad"]

    def _settle_updates(self) -> None:
        self.finish_updates()
        if self._optimizer_overlap == "stale":
            self._weights_may_change()

    def _wait_for_updates(self) -> None:
        if self._executor is not None:
            self._executor.wait_for_updates()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after the last update."""
        self.finish_updates()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        """The optimizer's state after the last update."""
        self.finish_updates()
        return self._fused.hide(optimizer, super().optimizer_state(optimizer))

    def _make_executor(self, module: "LightningModule") -> Executor:
        assert self.parallel_devices is not None
        self._model_signature = _signature(module)
        devices = [_indexed(device) for device in self.parallel_devices] * self._workers_per_device
        planner = self._planner = TrainingPlanner(
            len(devices),
            given=self._given_schedule,
            replica_groups=self._replica_groups,
            machine=lambda: measured_machine(devices, executor.weight_budget_bytes),
            grows_fused=self.root_device.type == "cpu",
            recompute=self._recompute,
            free_bytes=lambda: executor.free_bytes,
            notify=rank_zero_info,
            show=self._show_plan,
        )
        compute_dtype = self.precision_plugin.compute_dtype
        max_bytes = largest_unit_bytes(devices, self._gpu_memory_limit, compute_dtype)
        executor = Executor(
            root=module,
            units=find_units(module, self._units, max_bytes, self._upload_on_call),
            devices=devices,
            plan_training=planner.make,
            plan_evaluation=partial(evaluation_schedule, len(devices)),
            warn=rank_zero_warn,
            compute_dtype=compute_dtype,
            gpu_memory_limit=self._gpu_memory_limit,
            compile_options=self._compile_options,
            delays_updates=self._optimizer_overlap == "stale" and module.automatic_optimization,
        )
        _log.debug("units: %s", ", ".join(map(str, executor.units)))
        return executor

    def _check_devices(self) -> None:
        if self.root_device.type not in ("cpu", "cuda"):
            raise MisconfigurationException(
                f"RoundPipeStrategy runs on GPUs (CUDA) or on virtual CPU workers, but the device is"
                f" {self.root_device}. Use `Trainer(accelerator='gpu')` or `Trainer(accelerator='cpu')`."
            )
        visible = torch.cuda.device_count() if self.root_device.type == "cuda" else 0
        if _IS_INTERACTIVE and visible > len(self.parallel_devices or ()):
            # In a notebook Lightning takes `devices="auto"` for one GPU, because other strategies start processes.
            rank_zero_info(f"{visible} GPUs are visible; `Trainer(devices={visible})` uses them all.")

    def _check_module(self, module: "LightningModule", fits: bool) -> None:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
            raise ValueError(
                f"All parameters must have shapes before training, but these are not initialised: {_listed(lazy)}. Run"
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
                f" {_listed(missing)}. Load or initialise them in `configure_model` (for example"
                " `module.to_empty(device='cpu')`, then load a state dict)."
            )
        if moved := [name for name, tensor in tensors if tensor.device.type != "cpu"]:
            raise ValueError(
                f"Weights stay in host memory under RoundPipeStrategy, but these are elsewhere: {_listed(moved)}. Build"
                " the model on the CPU, and do not move it."
            )
        refuse_hidden_quantisation(module)
        if not fits:
            return
        if not module.automatic_optimization:
            self._check_manual_optimization()
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                "RoundPipeStrategy splits each batch into micro-batches, which a `training_step(dataloader_iter)` does"
                " not allow. Take `(batch, batch_idx)` instead."
            )
        batch_norm = torch.nn.modules.batchnorm._BatchNorm
        split = self._num_microbatches != 1 and module.automatic_optimization
        if split and any(isinstance(inner, batch_norm) for inner in module.modules()):
            rank_zero_warn(
                "The model has batch normalisation: its statistics are those of each micro-batch, in their order, not"
                " of the whole batch. `RoundPipeStrategy(num_microbatches=1)` keeps whole batches."
            )

    def _check_optimizers(self, module: "LightningModule") -> None:
        known = {id(parameter) for parameter in module.parameters()}
        groups = [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]
        foreign = [list(p.shape) for group in groups for p in group["params"] if id(p) not in known]
        if foreign and module.automatic_optimization:
            raise MisconfigurationException(
                f"The optimizer holds {len(foreign)} parameter(s) that the LightningModule does not (of shape"
                f" {', '.join(map(str, foreign[:5]))}): a copy of the model, or tensors in a plain list. They would not"
                " be trained. Register them (`self.model = ...`, `nn.ParameterList`), and make the optimizer from"
                " `self.parameters()`."
            )

    def _check_manual_optimization(self) -> None:
        if self._num_microbatches not in ("auto", 1):
            raise MisconfigurationException(
                "With manual optimization (`automatic_optimization = False`) `training_step` steps optimizers itself,"
                f" so it must run once for each batch, but got `num_microbatches={self._num_microbatches}`. Use"
                " `RoundPipeStrategy(num_microbatches=1)`, or automatic optimization."
            )
        if self.num_workers > 1:
            rank_zero_info(
                f"With manual optimization a batch is not split: one of the {self.num_workers} workers does all"
                " training steps. The others take part in validation, test and predict."
            )

    def model_to_device(self) -> None:
        """Nothing to do: the weights stay on the host."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; they stay on the host, with the weights."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        self._choose_kernels()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write an ordinary Lightning checkpoint, and the base of the step's randomness with it."""
        if self._last_seed is not None:
            checkpoint[_CHECKPOINT_KEY] = {"base_seed": self._last_seed}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; one of ours continues with the same randomness."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if _CHECKPOINT_KEY in checkpoint:
            self._base_seed = int(checkpoint[_CHECKPOINT_KEY]["base_seed"])
        return checkpoint

    def teardown(self) -> None:
        """Drop the executor. May be called before `setup`, after an error, and twice."""
        if self._executor is not None:
            self._unwrap_zero_grad()
            self._executor.close()
        self._executor = None
        if self._fence is not None and self.lightning_module is not None:
            callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
            if self._fence in callbacks:
                callbacks.remove(self._fence)
        if self._summary is not None and self.lightning_module is not None:
            callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
            if self._summary in callbacks:
                callbacks.remove(self._summary)
        self._fence = self._summary = None
        self._planner = None
        self._step_log = None
        self._base_seed = None
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_executor"] = state["_planner"] = state["_step_log"] = None
        return state

    # ------------------------------------------------------------------ when weights may change between steps

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as ever, or parameter by parameter while the closure runs.

        Raises:
            BaseException: what the closure or the optimizer raised.
        """
        if self._manual_run is not None:
            return self._step_inside_manual_run(self._manual_run, optimizer, closure, model, **kwargs)
        # Poisoned masters (see `testing`) get their values back after the step.
        if self._optimizer_overlap != "off" and self._module.automatic_optimization and not self.poison_masters:
            reason = reason_against_overlap(self._module, optimizer, self.precision_plugin)
            against_reaching = self._reason_against_reaching(optimizer)
            reaches = against_reaching is None and id(optimizer) in self._steady
            if self._optimizer_overlap == "stale" and against_reaching is not None:
                self._tell_once(f"No step lacks the update of the step before, because {against_reaching}.")
            if reason is None or reaches:
                return self._step_in_parts(optimizer, closure, along=reason is None, reaches=reaches)
            self._tell_once(f"The optimizer steps after the backward pass, not along with it, because {reason}.")
        before = _group_values(optimizer)
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._weights_may_change()
            self._steady[id(optimizer)] = before == _group_values(optimizer)

    def _reason_against_reaching(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why the update may not go on after the step, into the next one's forward pass; None if it may.

        The next step takes a snapshot of the parameter groups, so that the optimizer must leave them alone; whether it
        does is seen in its first step.
        """
        if getattr(self.precision_plugin, "scaler", None) is not None:
            return "the loss is scaled"
        if (reason := reason_against_parts(optimizer)) is not None:
            return reason
        if not self._steady.get(id(optimizer), True):
            return f"{type(optimizer).__name__} writes to its parameter groups"
        looks = what_looks_between_steps(self._module)
        return None if looks is None else f"{looks} may look at weights between steps"

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            rank_zero_info(message)

    def _step_inside_manual_run(
        self, run: ManualRun, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        try:
            with run.outside(parameters):
                return super().optimizer_step(optimizer, run.inside(closure, parameters), model, **kwargs)
        finally:
            self._weights_may_change()

    def _step_in_parts(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *, along: bool, reaches: bool
    ) -> Any:
        """Step along with the backward pass, or into the next step, or both."""
        assert self._executor is not None
        accumulated = self._module.trainer.accumulate_grad_batches
        before = _group_values(optimizer)
        stepper = PartialStepper(optimizer)
        if along:
            delays = reaches and self._executor.delays_updates
            self._update = UpdateRequest(stepper, 1 / accumulated, self._starts_anew(), reaches, delays)
        try:
            # What `optimizer.step(closure)` of the precision plugin calls first: the closure, then the hooks.
            result = self.precision_plugin._wrap_closure(self._module, optimizer, closure)
        finally:
            self._update = None
            if hooks_between_steps(self._module):
                self._weights_may_change()
        if reaches:
            self._executor.update_later(stepper)
            # Lightning clears gradients before a validation, ahead of any hook of ours.
            vars(self._module)["zero_grad"] = self._finish_and_zero_grad
        else:
            self._steady[id(optimizer)] = before == _group_values(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # For the schedulers, which patch `step` to see it.
        return result

    def on_train_start(self) -> None:
        """Hooks may have changed weights."""
        self._weights_may_change()

    def on_validation_start(self) -> None:
        """Hooks may have changed weights (an average may have been swapped in)."""
        self._weights_may_change()

    def on_validation_end(self) -> None:
        """Hooks may have changed weights (an average may have been swapped out)."""
        self._weights_may_change()

    def on_test_start(self) -> None:
        """Hooks may have changed weights."""
        self._weights_may_change()

    def on_predict_start(self) -> None:
        """Hooks may have changed weights."""
        self._weights_may_change()

    def _weights_may_change(self) -> None:
        if self._executor is not None:
            self._executor.invalidate()

    # ------------------------------------------------------------------ steps

    @property
    def step_stats(self) -> StepStats | None:
        """What the last step did; None before the first."""
        return self._step_stats

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of training steps; None before the first."""
        return self._schedule

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule of training steps to a JSON file, for `RoundPipeStrategy(plan=path)`.

        Raises:
            PlanError: there is none yet.
        """
        if self._schedule is None:
            raise PlanError("There is no plan before the first training step, which finds the order of calls.")
        save_schedule(self._schedule, os.fspath(path))

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """The device of every worker; none outside of fits and evaluations."""
        return () if self._executor is None else tuple(self._executor.devices)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that is in use for streaming, in bytes."""
        return 0 if self._executor is None else self._executor.store.pinned_bytes

    def summary_rows(self) -> list[tuple[str, str]]:
        """What runs in training steps, by name: units, workers, stages, memory in use, updates. Waits for updates."""
        if self._executor is None:
            return []
        self.finish_updates()
        rows = executor_rows(self._executor, self._module, self.optimizers)
        rows += schedule_rows(self._schedule if self._module.automatic_optimization else None)
        if self.optimizers and self._module.automatic_optimization:
            (optimizer,) = self.optimizers
            along = reason_against_overlap(self._module, optimizer, self.precision_plugin)
            rows.append(
                ("updates", update_text(self._optimizer_overlap, along, self._reason_against_reaching(optimizer)))
            )
        return rows

    def predicted_timeline(self) -> Timeline | None:
        """What the simulator says of the schedule of training steps; None until costs of calls have been measured."""
        return None if self._planner is None else self._planner.predicted_timeline()

    @property
    def num_workers(self) -> int:
        """Number of workers: devices times `workers_per_device`."""
        return len(self.parallel_devices or ()) * self._workers_per_device

    @property
    def _module(self) -> "LightningModule":
        assert self.lightning_module is not None
        return self.lightning_module

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Run the transfer hooks, but leave the batch on the host: a micro-batch goes to the worker that starts it."""
        return super().batch_to_device(batch, _HOST, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` and its backward, micro-batch by micro-batch.

        Gradients are kept until Lightning calls `backward` on the returned loss (it calls ``zero_grad`` in between).
        """
        if not self._module.automatic_optimization:
            return self._manual_step(*args, **kwargs)
        scale = self.precision_plugin.loss_scale
        with self.precision_plugin.train_step_context():
            result, micro_batches, objective = self._run("training", args, kwargs, scale)
        shares = objective.shares()
        counted = [
            (loss, share) for loss, share in zip(result.losses, shares, strict=True) if loss is not None and share > 0
        ]
        if not counted:
            return None
        total = torch.stack([loss.double().reshape(()) * share for loss, share in counted]).sum()
        dtype = torch.promote_types(counted[0][0].dtype, torch.float32)
        loss = publish_gradients(total.to(dtype), result.gradients, scale, final=result.updated)
        if not isinstance(result.outputs[0], Mapping) and not any(isinstance(out, Mapping) for out in result.outputs):
            return loss
        outputs = merge(result.outputs, shares, [micro_batch.num_samples for micro_batch in micro_batches])
        return {**outputs, "loss": loss}

    def _manual_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run a ``training_step`` that calls backward and optimizers itself: once, on the whole batch."""
        executor = self._current_executor()
        assert self._step_log is not None
        with ExitStack() as stack:
            stack.enter_context(self.precision_plugin.train_step_context())
            stack.enter_context(self._step_log.capture(direct=True))
            self._enter_training(stack, executor)
            run = stack.enter_context(
                executor.manual_run(self._seed("training", rest), add_gradients, self._step_log.recomputing)
            )
            stack.callback(setattr, self, "_manual_run", None)
            self._manual_run = run
            if run.device != _HOST:
                batch = move_data_to_device(batch, run.device)
            return run.run(partial(self._module.training_step, batch, *rest, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` for every micro-batch and merge what it returns."""
        return self._evaluate("validation", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` for every micro-batch and merge what it returns."""
        return self._evaluate("test", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` for every micro-batch and merge what it returns."""
        return self._evaluate("predict", self.precision_plugin.predict_step_context(), args, kwargs)

    def _evaluate(
        self, kind: str, context: AbstractContextManager[None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with context:
            result, micro_batches, objective = self._run(kind, args, kwargs)
        return merge(result.outputs, objective.shares(), [micro_batch.num_samples for micro_batch in micro_batches])

    def _run(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float = 1.0
    ) -> tuple[StepResult, Sequence[MicroBatch], BatchObjective]:
        executor, planner = self._current_executor(), self._planner
        assert self._step_log is not None
        assert planner is not None
        module, step_log = self._module, self._step_log
        trains = kind == "training"
        if trains and (schedule := planner.improve(one_part=executor.writes_buffers)) is not None:
            executor.adopt(kind, schedule)
        executor.times_calls = trains and planner.is_measuring
        executor.poison_masters = self.poison_masters
        batch, *rest = args
        micro_batches = split(batch, self._count_microbatches(), self._split_rules)
        objective = BatchObjective(
            self._loss_weight,
            micro_batches,
            module,
            labels_shifted=self._labels_shifted,
            scale=scale,
            watch=not trains,
        )

        uploaded: list[Any] = []  # see `Worker.uploading`
        views = ModuleViews(module)

        def function(index: int, worker: Worker) -> Any:
            micro_batch = micro_batches[index]
            data = micro_batch.data
            if worker.device != _HOST:
                with worker.uploading():
                    data = move_data_to_device(data, worker.device)
                uploaded.append(data)
            view = views.open(index)
            views.set_device(index, worker.device)
            with step_log.micro_batch(index, micro_batch.num_samples):
                return getattr(view, f"{kind}_step")(data, *rest, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(step_log.capture())
            if trains:
                self._enter_training(stack, executor)
            result = executor.run(
                kind,
                function,
                [micro_batch.num_samples for micro_batch in micro_batches],
                objective,
                trains=trains,
                seed=self._seed(kind, rest),
                overwrites_grad=trains and self._grad_is_spent(),
                on_glue=views.set_device,
                update=self._update if trains else None,
            )
        self._unwrap_zero_grad()
        views.carry_over()
        self._labels_shifted = objective.labels_shifted
        self._step_stats = result.stats
        if trains:
            planner.observe(result.stats)
            self._schedule = planner.schedule
        step_log.flush(result.losses if trains else objective.seen, objective.shares())
        return result, micro_batches, objective

    def _current_executor(self) -> Executor:
        assert self._executor is not None
        if _signature(self._module) != self._model_signature:
            # Layers were added, merged, frozen or unfrozen since.
            self._executor.close()
            self._executor = self._make_executor(self._module)
        return self._executor

    def _enter_training(self, stack: ExitStack, executor: Executor) -> None:
        """Switch on and off, for a training step, what differs from the ordinary model."""
        stack.enter_context(switched_off(self._module, executor.warn_once))
        if self._sequence_tiles:
            stack.enter_context(tiled_over_the_sequence(self._module, self._sequence_tiles, self._tiled_classes))
        if self._chunked_loss == "auto":
            self._chunked_loss = "liger" if liger_is_installed() else "torch"
        if self._chunked_loss:
            stack.enter_context(chunked_causal_lm_loss(self._module, self._chunked_loss))

    def _grad_is_spent(self) -> bool:
        """Whether Lightning will clear ``.grad`` before it adds this step's gradients, and nobody looks at it."""
        return self._starts_anew() and not clears_or_reads_spent_gradients(self._module)

    def _starts_anew(self) -> bool:
        """Whether ``.grad`` starts anew with this batch: Lightning clears it before the first that it accumulates."""
        trainer = self._module.trainer
        return bool(trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0)

    def _count_microbatches(self) -> int:
        if isinstance(self._num_microbatches, int):
            return self._num_microbatches
        if self._given_schedule is not None:
            return self._given_schedule.num_microbatches
        return max(_AUTO_MICROBATCHES, self.num_workers)

    def _seed(self, kind: str, indices: Sequence[Any]) -> int:
        """A seed for the step, the same when training is resumed in the middle of an epoch."""
        assert self._base_seed is not None
        trainer = self._module.trainer
        batches = trainer.fit_loop.epoch_loop.total_batch_idx
        places = [] if kind == "training" else [int(index) for index in indices]
        return counted_seed(self._base_seed, _STEP_KINDS.index(kind), batches, *places)


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


def _signature(module: "LightningModule") -> tuple[tuple[int, bool], ...]:
    """Changes whenever parameters are added or replaced; with automatic optimization, also frozen or unfrozen.

    With manual optimization that is an everyday thing (`LightningModule.toggle_optimizer`).
    """
    automatic = module.automatic_optimization
    return tuple((id(parameter), automatic and parameter.requires_grad) for parameter in module.parameters())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters in the parameter groups, by identity where they are tensors."""
    return [
        {name: id(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _listed(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
