"""`RoundPipeStrategy`: Lightning's calls, answered by the runtime. No algorithm lives here."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.init import _EmptyInit
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import move_data_to_device, rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_roundpipe.arguments import checked_arguments
from lightning_roundpipe.checkpoint_io import FileCheckpointIO
from lightning_roundpipe.checks import check_devices, check_module, check_optimizers, check_training, listed
from lightning_roundpipe.chunked_loss import chunked_causal_lm_loss, liger_is_installed
from lightning_roundpipe.exceptions import MachineLostError, PlanError
from lightning_roundpipe.fence import UpdateFence, what_looks_between_steps
from lightning_roundpipe.fused_kernels import FusedKernels
from lightning_roundpipe.machines import Machines, settings_of
from lightning_roundpipe.module_view import ModuleViews
from lightning_roundpipe.overlap import (
    clears_or_reads_spent_gradients,
    hooks_between_steps,
    needs_gradients_of_each_batch,
    reason_against_completion,
    reason_against_overlap,
)
from lightning_roundpipe.plan.files import save_schedule
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.timeline import Timeline
from lightning_roundpipe.precision import RoundPipePrecision
from lightning_roundpipe.publish import add_gradients, publish_gradients
from lightning_roundpipe.runtime.collectives import (
    GradientReducer,
    Reduction,
    ReductionRequest,
    is_lost_connection,
    naming_lost_machines,
)
from lightning_roundpipe.runtime.executor import Executor, StepResult, largest_unit_bytes
from lightning_roundpipe.runtime.hardware import host_facts
from lightning_roundpipe.runtime.hazards import switched_off
from lightning_roundpipe.runtime.host_budget import count_host_memory
from lightning_roundpipe.runtime.manual_run import ManualRun
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.microbatch import MicroBatch, merge, split
from lightning_roundpipe.runtime.objective import BatchObjective
from lightning_roundpipe.runtime.partial_step import PartialStepper, intercepted, reason_against_parts
from lightning_roundpipe.runtime.planning import (
    TrainingPlanner,
    evaluation_schedule,
    given_schedule,
    measured_machine,
)
from lightning_roundpipe.runtime.randomness import counted_seed
from lightning_roundpipe.runtime.shares import UpdateShares, parameters_of
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
_TIMEOUT_S = 1800.0


class RoundPipeStrategy(ParallelStrategy):
    """Trains a model whose weights, gradients and optimizer state stay in host memory.

    The model is cut into units (its layers). Each batch is split into micro-batches, and a thread per micro-batch runs
    the ordinary ``training_step``; every call of a unit runs on the worker (GPU, or virtual CPU device) of its stage,
    with weights that are uploaded for it. Stages are dealt to the workers round-robin. The numbers equal those of plain
    training on the whole batch.

    ``Trainer(devices=N)`` gives N workers in one process. With ``Trainer(num_nodes=M)`` there is one such process on
    each of M machines, started by any launcher that Lightning knows; each trains on its part of the data, and gradients
    are averaged over the machines, as with `DistributedDataParallel`.

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
            hooks that look at gradients) that is said once in the log, and all of it is left for then; optimizers that
            can not step in parts step as with ``"off"``. ``"stale"``: a step computes with weights that lack the update
            of the step before (never an older one), and so need not wait for it: the one-step delay of the RoundPipe
            paper. It takes one more copy of the trained weights and of their gradients. Where something looks at
            weights between steps, none is late; validation, checkpoints and hooks see finished weights.
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
        host_weights: where weights lie in host memory. ``"pinned"``: page-locked, for copies at full speed.
            ``"pageable"``: in ordinary memory, from which a thread copies them into a few page-locked buffers.
            ``"mmap"``: frozen weights that were loaded without a copy (`loading.load_pretrained`) stay in their files,
            and are read ahead of need through such buffers; others are pinned. ``"auto"``: what lies in files is pinned
            as far as host memory lasts, and stays there beyond; virtual workers leave it there.
        upload_on_call: class names of units that may not be called at all, as the experts of a mixture that are modules
            in a list: their weights are uploaded when they are called, not ahead, and so not at all without tokens.
        save_frozen_weights: whether checkpoints hold frozen weights, too. Without them a checkpoint of adapters is as
            small as these; it can only be loaded into a module that has its frozen weights from elsewhere, as it had
            when training began. What was trained before, or got its values from a checkpoint, is saved in any case.
        process_group_backend: with several machines, the backend of `torch.distributed`, for tensors in host memory.
        timeout: how long a machine waits for the others before it gives up, in seconds or as a `timedelta`.
        gradient_wire_dtype: with several machines, the dtype in which gradients cross the network: ``"float32"``;
            ``"bfloat16"``, half the traffic for one more rounding of each machine's gradients (they are summed in
            float32); by default their own.
        shard_optimizer_state: with several machines, whether each updates a share of the parameters and sends the
            result to the others: optimizer state then takes the host memory of a share, for more traffic. Checkpoints
            hold all of it; machine 0 collects it for them.
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
        host_weights: str = "auto",
        save_frozen_weights: bool = True,
        process_group_backend: str = "gloo",
        timeout: float | timedelta = _TIMEOUT_S,
        gradient_wire_dtype: str | None = None,
        shard_optimizer_state: bool = False,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._arguments = checked_arguments(
            num_microbatches=num_microbatches,
            units=units,
            loss_weight=loss_weight,
            optimizer_overlap=optimizer_overlap,
            workers_per_device=workers_per_device,
            split_rules=split_rules,
            gpu_memory_limit=gpu_memory_limit,
            plan=plan,
            replica_groups=replica_groups,
            recompute=recompute,
            compile_units=compile_units,
            show_plan=show_plan,
            chunked_loss=chunked_loss,
            sequence_tiles=sequence_tiles,
            upload_on_call=upload_on_call,
            host_weights=host_weights,
            save_frozen_weights=save_frozen_weights,
            process_group_backend=process_group_backend,
            timeout=timeout,
            gradient_wire_dtype=gradient_wire_dtype,
            shard_optimizer_state=shard_optimizer_state,
        )
        self._machines = Machines(self._arguments.process_group_backend, self._arguments.timeout)
        self._not_as_built: Any = WeakIdKeyDictionary()
        self._shares: UpdateShares | None = None
        self._sync_blocked = False
        self._unreduced: set[int] = set()
        self._tiled_classes: set[str] = set()
        self._chunked_loss = self._arguments.chunked_loss
        self._update: UpdateRequest | None = None
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

    # ------------------------------------------------------------------ one process on each machine

    @property
    def root_device(self) -> torch.device:
        """The first worker's device; ``self.device`` of the LightningModule outside of steps."""
        return self.parallel_devices[0] if self.parallel_devices else _HOST

    @property
    def is_distributed(self) -> bool:
        """Whether there are several machines; with one, samplers, tuners and ``sync_dist`` see a single device."""
        return self._machines.count > 1

    @property
    def world_size(self) -> int:
        """Number of processes: one on each machine."""
        return self._machines.count

    @property
    def global_rank(self) -> int:
        """Number of this machine."""
        return self._machines.rank

    @property
    def local_rank(self) -> int:
        """0: there is one process on each machine."""
        return 0

    @property
    def node_rank(self) -> int:
        """Number of this machine."""
        return self._machines.rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each machine sees its part of the data, whatever the number of its workers."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def set_world_ranks(self) -> None:
        """Find out which machine this is; called when the Trainer is built.

        Raises:
            MisconfigurationException: there are more or fewer processes than machines.
        """
        if self.cluster_environment is not None:
            self._machines.launched_by(self.cluster_environment, self._num_nodes)

    def setup_environment(self) -> None:
        """Meet the other machines."""
        super().setup_environment()
        if self.is_distributed:
            reset_seed()
            self._machines.join()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the machines."""
        return self._machines.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all machines, along a new first dimension; with one machine, the tensor itself."""
        return self._machines.all_gather(tensor, group, sync_grads=sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What machine ``src`` gave."""
        return self._machines.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all machines have come here."""
        self._machines.barrier(name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all machines (or any of them) say yes."""
        votes = self._machines.reduce(torch.tensor(int(decision)), None, "sum")
        return bool(votes == self.world_size if all and self._machines.are_joined else votes > 0)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients on the machine that has them: more batches follow before the optimizer steps."""
        outer, self._sync_blocked = self._sync_blocked, True
        try:
            yield
        finally:
            self._sync_blocked = outer

    # ------------------------------------------------------------------ plugins

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints: by default without a copy in memory."""
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FileCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

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
        check_devices(self.root_device, len(self.parallel_devices or ()))
        check_module(module)
        if fits:
            check_training(module, self._arguments.num_microbatches, self.num_workers)
        if fits:
            wanted = self._arguments.num_microbatches if isinstance(self._arguments.num_microbatches, int) else None
            self._given_schedule = given_schedule(
                self._arguments.plan,
                self._arguments.replica_groups,
                self.num_workers,
                wanted,
                self._arguments.recompute,
            )
        self.model = self.precision_plugin.convert_module(self.model)
        if fits:
            self._steady.clear()
            self._raise_fence(trainer)
            self._add_summary(trainer)
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            check_optimizers(module, self.optimizers)
            self._choose_kernels()
            self._divide_optimizer_state()
        if self.is_distributed:
            self._meet(trainer, fits)
        self.setup_precision_plugin()
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = self.root_device.type
        if self._base_seed is None:
            self._base_seed = torch.initial_seed() % 2**63
        self._base_seed = self.broadcast(self._base_seed)
        self._last_seed = self._base_seed  # For checkpoints that are saved after the fit.
        self._step_log = StepLog(module)
        self._executor = self._make_executor(module)

    def _divide_optimizer_state(self) -> None:
        """Give each machine its share of the parameters to update, if that is wanted."""
        self._shares = None
        if not (self._arguments.shard_optimizer_state and self.is_distributed):
            return
        reasons = [reason_against_parts(optimizer) for optimizer in self.optimizers]
        if not self._module.automatic_optimization:
            reasons.append("with manual optimization any code may step an optimizer")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            reasons.append("the loss scale belongs to a step over all parameters")
        if reason := next(filter(None, reasons), None):
            raise MisconfigurationException(
                f"`shard_optimizer_state=True` lets each machine step a part of the parameters, but {reason}. Leave it"
                " out."
            )
        self._shares = UpdateShares(self.global_rank, self.world_size)

    def _choose_kernels(self) -> None:
        # With a loss scale, fused kernels take it out of the gradients themselves, and clipping is refused.
        if self._module.automatic_optimization and getattr(self.precision_plugin, "scaler", None) is None:
            self._fused.choose(self._module, self.optimizers)

    def _meet(self, trainer: "Trainer", fits: bool) -> None:
        """See that all machines do the same, and give them the same weights."""
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        facts: dict[str, Any] = {
            f"`{name}`": f"{list(tensor.shape)} {tensor.dtype}{' trained' * tensor.requires_grad}"
            for name, tensor in tensors.items()
        }
        if fits:
            facts |= settings_of(trainer, self._module)
            facts |= {
                "`num_microbatches`": self._arguments.num_microbatches,
                "`loss_weight`": getattr(self._arguments.loss_weight, "__qualname__", str(self._arguments.loss_weight)),
                "`optimizer_overlap`": self._arguments.optimizer_overlap,
                "`gradient_wire_dtype`": self._arguments.gradient_wire_dtype,
                "`shard_optimizer_state`": self._arguments.shard_optimizer_state,
            }
            if self._layer_sync is not None:
                rank_zero_warn(
                    "`sync_batchnorm=True` has no effect: batch normalisation sees each micro-batch of each machine."
                )
        self._machines.check_alike(facts)
        plain = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        if differing := self._machines.spread(plain):
            rank_zero_info(
                f"{differing} of {len(plain)} weights and buffers were not the same on all machines; all have those of"
                " machine 0 now."
            )

    def _raise_fence(self, trainer: "Trainer") -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if self._fence is None:
            self._fence = UpdateFence(self.finish_updates, self._stop_after_error, self._settle_updates)
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
        if self._arguments.optimizer_overlap == "stale":
            self._weights_may_change()

    def _stop_after_error(self, error: BaseException) -> None:
        """Wait for the update, and let the other machines know at once: they would wait for this one in vain."""
        if self._executor is not None:
            self._executor.wait_for_updates()
            if self._machines.are_joined and self._executor.reducer is not None:
                self._executor.reducer.close()
        self._machines.abandon(error)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the other machines; give a name to the error if it is one of them that was lost.

        Raises:
            MachineLostError: a collective failed that Lightning, a metric or user code had asked for.
        """
        super().on_exception(exception)
        self._stop_after_error(exception)
        if is_lost_connection(exception):
            # Lightning does this after the present method, unless it raises.
            trainer = self._module.trainer
            for logger in trainer.loggers:
                logger.finalize("failed")
            trainer._teardown()
            trainer.state.stage = None
            with naming_lost_machines("while machines exchanged something"):
                raise exception

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state after the last update, without frozen weights if these are not to be saved."""
        self.finish_updates()
        state = super().lightning_module_state_dict()
        if self._arguments.save_frozen_weights:
            return state
        state = copy(state)  # With its metadata.
        for name in self._frozen_as_built() & state.keys():
            del state[name]
        return state

    def _frozen_as_built(self) -> set[str]:
        """Names of parameters that have neither been trained nor got other values from a checkpoint."""
        return {
            name
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and parameter not in self._not_as_built
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; those that the checkpoint left out stay what they are.

        Raises:
            RuntimeError: ``strict``, and other keys are missing, or there are some that the module does not have.
        """
        module, state = self._module, checkpoint["state_dict"]
        # Not written, what is the same stays in the file in which it lies.
        named = dict(module.named_parameters(remove_duplicate=False))
        same = {name: parameter for name, parameter in named.items() if _is_frozen_as(parameter, state.get(name))}
        state = copy(state)
        state.update(same)
        left_out = set(checkpoint.get(_CHECKPOINT_KEY, {}).get("left_out", ()))
        keys = module.load_state_dict(state, strict=strict and not left_out)
        if strict and left_out and keys is not None:
            missing = [key for key in keys.missing_keys if key not in left_out]
            if missing or keys.unexpected_keys:
                raise RuntimeError(
                    f"The checkpoint left {len(left_out)} frozen weights out, and besides does not fit the"
                    f" {type(module).__name__}: missing {listed(missing) if missing else 'nothing'}, unexpected"
                    f" {listed(keys.unexpected_keys) if keys.unexpected_keys else 'nothing'}."
                )
        self._not_as_built.update({named[name]: True for name in named.keys() & state.keys() - same.keys()})

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        """The optimizer's state after the last update."""
        self.finish_updates()
        state = super().optimizer_state(optimizer)
        if self._shares is not None:
            if not self._machines.are_joined:
                raise MachineLostError(
                    "The optimizer state can not be saved: the other machines, which have parts of it"
                    " (`shard_optimizer_state=True`), are gone."
                )
            state = self._shares.whole_state(state)
        return self._fused.hide(optimizer, state)

    def _make_executor(self, module: "LightningModule") -> Executor:
        assert self.parallel_devices is not None
        self._model_signature = _signature(module)
        self._not_as_built.update({parameter: True for parameter in module.parameters() if parameter.requires_grad})
        devices = [_indexed(device) for device in self.parallel_devices] * self._arguments.workers_per_device
        planner = self._planner = TrainingPlanner(
            len(devices),
            given=self._given_schedule,
            replica_groups=self._arguments.replica_groups,
            machine=lambda: measured_machine(devices, executor.weight_budget_bytes),
            grows_fused=self.root_device.type == "cpu",
            recompute=self._arguments.recompute,
            free_bytes=lambda: executor.free_bytes,
            notify=rank_zero_info,
            show=self._arguments.show_plan,
        )
        compute_dtype = self.precision_plugin.compute_dtype
        max_bytes = largest_unit_bytes(devices, self._arguments.gpu_memory_limit, compute_dtype)
        units = find_units(module, self._arguments.units, max_bytes, self._arguments.upload_on_call)
        fits = module.trainer.state.fn == TrainerFn.FITTING
        delays = self._arguments.optimizer_overlap == "stale" and module.automatic_optimization
        accumulates = int(module.trainer.accumulate_grad_batches > 1)
        budget, placement = count_host_memory(
            module.parameters(),
            self.optimizers if fits else (),
            kind=self._arguments.host_weights,
            facts=host_facts(),
            num_gpus=sum(device.type == "cuda" for device in devices),
            compute_dtype=compute_dtype,
            largest_unit_bytes=max((unit.num_bytes for unit in units), default=0),
            gradient_copies=(self._arguments.replica_groups or 1) + max(accumulates, int(delays)),
            delays_updates=delays,
            num_shares=self.world_size if self._shares is not None else 1,
        )
        budget.check(rank_zero_warn)
        executor = Executor(
            root=module,
            units=units,
            devices=devices,
            plan_training=planner.make,
            plan_evaluation=partial(evaluation_schedule, len(devices)),
            warn=rank_zero_warn,
            compute_dtype=compute_dtype,
            gpu_memory_limit=self._arguments.gpu_memory_limit,
            placement=placement,
            budget=budget,
            compile_options=self._arguments.compile_options,
            delays_updates=delays,
            reducer=self._make_reducer(module),
        )
        _log.debug("units: %s", ", ".join(map(str, executor.units)))
        return executor

    def _make_reducer(self, module: "LightningModule") -> GradientReducer | None:
        group = self._machines.open_gradient_group() if module.trainer.state.fn == TrainerFn.FITTING else None
        if group is None:
            return None
        # With manual optimization parameters are frozen and thawed all the time.
        trained = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
            or (not module.automatic_optimization and (parameter.is_floating_point() or parameter.is_complex()))
        ]
        return GradientReducer(group, trained, self._arguments.gradient_wire_dtype)

    def model_to_device(self) -> None:
        """Nothing to do: the weights stay on the host."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; they stay on the host, with the weights."""
        files = FileMappings()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state if self._shares is None else self._shares.own_part(optimizer, state))
            # PyTorch takes tensors over as they are, mapped ones too; but these will be written to.
            for values in optimizer.state.values():
                values.update({key: value.clone() for key, value in values.items() if _lies_in(value, files)})
        self._choose_kernels()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write an ordinary Lightning checkpoint; in it the base of the step's randomness, and what was left out."""
        ours: dict[str, Any] = {} if self._last_seed is None else {"base_seed": self._last_seed}
        if not self._arguments.save_frozen_weights and "state_dict" in checkpoint:
            ours["left_out"] = sorted(self._frozen_as_built() - checkpoint["state_dict"].keys())
        if ours:
            checkpoint[_CHECKPOINT_KEY] = ours
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self._executor is None:
            self.checkpoint_io.teardown()  # After a fit nobody else waits for a plugin that writes in the background.

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; one of ours continues with the same randomness."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if "base_seed" in checkpoint.get(_CHECKPOINT_KEY, {}):
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
        self._machines.leave()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state["_executor"] = state["_planner"] = state["_step_log"] = None
        state["_not_as_built"] = WeakIdKeyDictionary()
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
        overlaps = self._arguments.optimizer_overlap != "off" and self._module.automatic_optimization and not kwargs
        if overlaps and not self.poison_masters:
            reason = reason_against_overlap(self._module, optimizer, self.precision_plugin)
            against_reaching = self._reason_against_reaching(optimizer)
            reaches = against_reaching is None and id(optimizer) in self._steady
            if self._arguments.optimizer_overlap == "stale" and against_reaching is not None:
                self._tell_once(f"No step lacks the update of the step before, because {against_reaching}.")
            if reason is None or reaches:
                return self._step_in_parts(optimizer, closure, model, along=reason is None, reaches=reaches)
            self._tell_once(f"The optimizer steps after the backward pass, not along with it, because {reason}.")
        if self._shares is not None:
            return self._step_in_parts(optimizer, closure, model, along=False, reaches=False)
        before, step = _group_values(optimizer), optimizer.step
        stepped = False

        def noted_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal stepped
            stepped = True
            return step(*args, **kwargs)

        noted_step.__wrapped__ = step  # type: ignore[attr-defined]  # `GradScaler` looks at its arguments.
        try:
            with intercepted(optimizer, noted_step):
                return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._weights_may_change()
            if stepped:
                self._steady[id(optimizer)] = before == _group_values(optimizer)

    def _reason_against_reaching(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why the update may not go on after the step, into the next one's forward pass; None if it may.

        The next step takes a snapshot of the parameter groups, so that the optimizer must leave them alone; whether it
        does is seen in its first step.
        """
        if self._shares is not None:
            return "machines wait for each other's updates"
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
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any, *, along: bool, reaches: bool
    ) -> Any:
        """Step along with the backward pass, or into the next step, or both; or this machine's share alone.

        The precision plugin does all that it does around a step; `optimizer.step` runs the closure and updates nothing.
        """
        assert self._executor is not None
        before = _group_values(optimizer)
        trainer, plugin = self._module.trainer, self.precision_plugin
        if self._shares is not None:
            self._shares.assign(parameters_of(optimizer))
        only = None if self._shares is None else self._shares.owns
        stepper: PartialStepper | None = None
        # Clipping by norm is all that stands in the way of updates: norms can be taken as gradients land.
        measures = reaches and not along
        measures = measures and bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        measures = measures and reason_against_completion(self._module, plugin) is None
        if along or measures:
            stepper = PartialStepper(optimizer, only)
            self._update = UpdateRequest(
                stepper,
                # With several machines, what has been averaged over them is complete.
                1.0 if self.is_distributed else 1 / trainer.accumulate_grad_batches,
                self.is_distributed or self._starts_anew(),
                leaves_rest=reaches,
                delays=reaches and self._executor.delays_updates,
                measures=measures,
            )
            plugin.norm_clipper = stepper.clip

        def step(closure: Callable[[], Any] | None = None) -> Any:
            nonlocal stepper
            result = None if closure is None else closure()
            # Now, because the loss scaler hangs on fused optimizers what they need, for the length of this call.
            stepper = stepper or PartialStepper(optimizer, only)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # What schedulers replace `step` to see.
            return result

        try:
            with intercepted(optimizer, step):
                result = super().optimizer_step(optimizer, closure, model)
        finally:
            self._update = plugin.norm_clipper = None
            if hooks_between_steps(self._module):
                self._weights_may_change()
        if self._shares is not None:
            assert stepper is not None  # There is no loss scaler.
            self._exchange_updates(optimizer, stepper, self._shares, along=along)
        if not reaches:
            self._steady[id(optimizer)] = before == _group_values(optimizer)
        elif stepper is None:
            # The loss scaler has found infinite gradients. No update is missing, so that none must be late.
            self._weights_may_change()
        else:
            self._executor.update_later(stepper)
            # Lightning clears gradients before a validation, ahead of any hook of ours.
            vars(self._module)["zero_grad"] = self._finish_and_zero_grad
        return result

    def _exchange_updates(
        self, optimizer: torch.optim.Optimizer, stepper: PartialStepper, shares: UpdateShares, *, along: bool
    ) -> None:
        """Update this machine's share, if that was not done along with the backward pass, and bring the others'."""
        assert self._executor is not None
        assert self._machines.gradient_group is not None
        updated = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        self._executor.store.await_uploads(updated)
        if not along:
            stepper.step(stepper.remaining())
            stepper.finish()
        shares.exchange(updated, self._machines.gradient_group)
        self._executor.store.refresh_parameters(updated)

    def on_train_start(self) -> None:
        """Hooks may have changed weights; and machines must have as many batches."""
        self._weights_may_change()
        trainer = self._module.trainer
        self._machines.check_alike({"number of training batches": trainer.num_training_batches})

    def on_validation_start(self) -> None:
        """Hooks may have changed weights (an average may have been swapped in)."""
        self._share_buffers()
        self._weights_may_change()

    def on_validation_end(self) -> None:
        """Hooks may have changed weights (an average may have been swapped out)."""
        self._weights_may_change()

    def on_test_start(self) -> None:
        """Hooks may have changed weights."""
        self._share_buffers()
        self._weights_may_change()

    def on_predict_start(self) -> None:
        """Hooks may have changed weights."""
        self._share_buffers()
        self._weights_may_change()

    def _share_buffers(self) -> None:
        """Give all machines the buffers of machine 0 (running statistics), as `DistributedDataParallel` does."""
        reducer = self._executor.reducer if self._executor is not None else None
        if reducer is not None and reducer.writes_buffers:
            self._machines.spread(self._module.buffers())

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
        return 0 if self._executor is None else self._executor.pinned_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that stay in the files from which they were loaded."""
        return 0 if self._executor is None else self._executor.store.mapped_bytes

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
                (
                    "updates",
                    update_text(self._arguments.optimizer_overlap, along, self._reason_against_reaching(optimizer)),
                )
            )
        return rows

    def predicted_timeline(self) -> Timeline | None:
        """What the simulator says of the schedule of training steps; None until costs of calls have been measured."""
        return None if self._planner is None else self._planner.predicted_timeline()

    @property
    def num_workers(self) -> int:
        """Number of workers: devices times `workers_per_device`."""
        return len(self.parallel_devices or ()) * self._arguments.workers_per_device

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
        loss = publish_gradients(total.to(dtype), result.gradients, scale, final=result.final)
        if not isinstance(result.outputs[0], Mapping) and not any(isinstance(out, Mapping) for out in result.outputs):
            return loss
        outputs = merge(result.outputs, shares, [micro_batch.num_samples for micro_batch in micro_batches])
        return {**outputs, "loss": loss}

    def _manual_step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run a ``training_step`` that calls backward and optimizers itself: once, on the whole batch."""
        executor = self._current_executor()
        assert self._step_log is not None
        self._share_buffers()
        with ExitStack() as stack:
            stack.enter_context(self.precision_plugin.train_step_context())
            stack.enter_context(self._step_log.capture(direct=True))
            self._enter_training(stack, executor)
            run = stack.enter_context(
                executor.manual_run(self._seed("training", rest), self._add_gradients, self._step_log.recomputing)
            )
            stack.callback(setattr, self, "_manual_run", None)
            self._manual_run = run
            if run.device != _HOST:
                batch = move_data_to_device(batch, run.device)
            return run.run(partial(self._module.training_step, batch, *rest, **kwargs))

    def _add_gradients(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add gradients of a manual step to ``.grad``, averaged over the machines unless that is blocked."""
        assert self._executor is not None
        if self._executor.reducer is None:
            add_gradients(gradients)
            return
        if self._sync_blocked:
            self._unreduced |= {id(parameter) for parameter, _ in gradients}
            add_gradients(gradients)
            return
        found = {id(parameter): gradient for parameter, gradient in gradients}

        def take(parameter: Tensor) -> Tensor | None:
            gradient, before = found.get(id(parameter)), parameter.grad
            if id(parameter) not in self._unreduced or before is None:
                return gradient
            parameter.grad = None
            return before if gradient is None else before + gradient

        reduction = Reduction(self._executor.reducer, self._request(), take)
        reduction.start()
        reduction.finish(writes_buffers=self._manual_run is not None and self._manual_run.writes_buffers)
        self._unreduced.clear()
        add_gradients(reduction.collect())

    def _batch_number(self) -> int:
        return int(self._module.trainer.fit_loop.epoch_loop.total_batch_idx)

    def _request(self, factor: float | None = None, *, adds_grad: bool = False) -> ReductionRequest:
        is_last = self._module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return ReductionRequest(self._batch_number(), is_last, factor, adds_grad)

    def _reduction(self) -> ReductionRequest | None:
        """How the gradients of a training step are averaged over the machines.

        Where batches are accumulated that is done once, with the last batch, unless something sees each batch's own.
        """
        if not self.is_distributed:
            return None
        accumulated = self._module.trainer.accumulate_grad_batches
        if needs_gradients_of_each_batch(self._module) or (accumulated == 1 and self._update is None):
            return self._request()
        if self._sync_blocked:
            return None
        return self._request(1 / accumulated, adds_grad=not self._starts_anew())

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
        if trains:
            self._share_buffers()
        if trains and (schedule := planner.improve(one_part=executor.writes_buffers)) is not None:
            executor.adopt(kind, schedule)
        executor.times_calls = trains and planner.is_measuring
        executor.poison_masters = self.poison_masters
        batch, *rest = args
        micro_batches = split(batch, self._count_microbatches(), self._arguments.split_rules)
        objective = BatchObjective(
            self._arguments.loss_weight,
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
                reduction=self._reduction() if trains else None,
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
        if self._arguments.sequence_tiles:
            stack.enter_context(
                tiled_over_the_sequence(self._module, self._arguments.sequence_tiles, self._tiled_classes)
            )
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
        if isinstance(self._arguments.num_microbatches, int):
            return self._arguments.num_microbatches
        if self._given_schedule is not None:
            return self._given_schedule.num_microbatches
        return max(_AUTO_MICROBATCHES, self.num_workers)

    def _seed(self, kind: str, indices: Sequence[Any]) -> int:
        """A seed for the step, the same when training is resumed in the middle of an epoch."""
        assert self._base_seed is not None
        places = [] if kind == "training" else [int(index) for index in indices]
        base_seed = counted_seed(self._base_seed, self.global_rank) if self.global_rank else self._base_seed
        return counted_seed(base_seed, _STEP_KINDS.index(kind), self._batch_number(), *places)


def _signature(module: "LightningModule") -> tuple[tuple[int, bool], ...]:
    """Changes whenever parameters are added or replaced; with automatic optimization, also frozen or unfrozen.

    With manual optimization that is an everyday thing (`LightningModule.toggle_optimizer`).
    """
    automatic = module.automatic_optimization
    return tuple((id(parameter), automatic and parameter.requires_grad) for parameter in module.parameters())


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _lies_in(value: Any, files: FileMappings) -> bool:
    return isinstance(value, Tensor) and value in files


def _is_frozen_as(parameter: Tensor, value: Any) -> bool:
    """Whether ``parameter`` is not trained and has the values of ``value`` already."""
    if parameter.requires_grad or not isinstance(value, Tensor) or value.dtype is not parameter.dtype:
        return False
    return parameter.device == value.device == _HOST and torch.equal(parameter, value)


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters in the parameter groups, by identity where they are tensors."""
    return [
        {name: id(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
