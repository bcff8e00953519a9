"""Host memory that training will take, counted before any of it is allocated.

Only what is not there yet counts against what is free: weights that lie in memory already move into pinned slabs, unit
by unit, and give their old memory back. What is not known is left out, or marked as an estimate, and then warned of but
never refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.exceptions import HostMemoryError
from lightning_roundpipe.runtime.hardware import HostFacts
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.placement import WeightPlacement
from lightning_roundpipe.runtime.staging import RING_BYTES
from lightning_roundpipe.runtime.units import tensor_bytes

__all__ = ["HostBudget", "HostNeed", "count_host_memory", "state_elements"]

_SPARE = 0.1
"""Share of the free memory that ``host_weights="auto"`` leaves to kept inputs, data and everything else."""


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """One kind of memory.

    Attributes:
        name: what it is for.
        num_bytes: of all of it.
        new_bytes: of that, what is not allocated yet.
        pinned_bytes: of that, what is to be page-locked.
        is_estimate: whether the numbers are a guess.
        remedies: what needs less, in words, and the bytes that it saves.
    """

    name: str
    num_bytes: int
    new_bytes: int
    pinned_bytes: int = 0
    is_estimate: bool = False
    remedies: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class HostBudget:
    """What training needs of host memory, and what there is.

    Attributes:
        needs: see `HostNeed`.
        facts: the host.
    """

    needs: tuple[HostNeed, ...]
    facts: HostFacts

    @property
    def new_bytes(self) -> int:
        """Bytes that will be allocated."""
        return sum(need.new_bytes for need in self.needs)

    @property
    def limit_bytes(self) -> int:
        """Bytes that can be allocated: free, reclaimable (the kernel's cache of files), and free swap."""
        return self.facts.available_bytes + self.facts.swap_bytes

    def check(self, warn: Callable[[str], None]) -> None:
        """Refuse what can not fit.

        Args:
            warn: told if it fits only with swap, or perhaps not, by an estimate.

        Raises:
            HostMemoryError: it does not fit.
        """
        known = sum(need.new_bytes for need in self.needs if not need.is_estimate)
        if known > self.limit_bytes:
            raise HostMemoryError(self.describe())
        if self.new_bytes > self.limit_bytes:
            warn(f"Host memory may not last, by an estimate. {self.describe()}")
        elif self.new_bytes > self.facts.available_bytes:
            warn(f"Host memory lasts only with swap, which is slow. {self.describe()}")

    def with_kept_inputs(self, num_bytes: int, gradients_there: int, facts: HostFacts) -> "HostBudget":
        """The budget when weights have found their place, and the first micro-batch has shown what layers are given.

        Args:
            num_bytes: of the inputs that a step keeps in host memory.
            gradients_there: bytes of gradients that are in memory already.
            facts: the host, now.
        """
        remedy = "smaller batches (`accumulate_grad_batches` makes up for them) or shorter rows", num_bytes // 2
        kept = HostNeed(name="kept inputs of layers", num_bytes=num_bytes, new_bytes=num_bytes, remedies=(remedy,))
        needs = []
        for need in self.needs:
            placed = need.new_bytes if "weights" in need.name else 0
            landed = gradients_there if need.name == "gradients" else 0
            needs.append(replace(need, new_bytes=max(0, need.new_bytes - placed - landed)))
        return HostBudget((*needs, kept), facts)

    def describe(self) -> str:
        """A table of the needs, what there is, and what would need less."""
        rows: list[tuple[str, ...]] = [("", "in all", "to come", "page-locked")]
        rows += [
            (
                need.name + (" (estimate)" if need.is_estimate else ""),
                *map(_gib, (need.num_bytes, need.new_bytes, need.pinned_bytes)),
            )
            for need in self.needs
            if need.num_bytes
        ]
        totals = (sum(need.num_bytes for need in self.needs), self.new_bytes, self.pinned_bytes)
        rows.append(("together", *map(_gib, totals)))
        width = max(len(row[0]) for row in rows)
        table = [f"  {row[0]:<{width}}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows]
        text = [
            f"Training is to take {_gib(self.new_bytes)} of host memory, and {_gib(self.limit_bytes)} can be had"
            f" ({_gib(self.facts.available_bytes)} free or reclaimable, {_gib(self.facts.swap_bytes)} swap, of"
            f" {_gib(self.facts.memory_bytes)}).",
            *table,
        ]
        if remedies := [remedy for need in self.needs for remedy in need.remedies if remedy[1] > 0]:
            text.append("  What takes less:")
            text += [
                f"    - {words}: {_gib(saved)} less" + (", which is enough" if self._is_enough(saved) else "")
                for words, saved in sorted(remedies, key=lambda remedy: -remedy[1])
            ]
        return "\n".join(text)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are to be page-locked."""
        return sum(need.pinned_bytes for need in self.needs)

    def _is_enough(self, saved: int) -> bool:
        return self.limit_bytes < self.new_bytes <= self.limit_bytes + saved


def count_host_memory(
    parameters: Iterable[Tensor],
    optimizers: Sequence[Any],
    *,
    kind: str,
    facts: HostFacts,
    num_gpus: int,
    compute_dtype: torch.dtype | None,
    largest_unit_bytes: int,
    gradient_copies: int,
    delays_updates: bool = False,
    num_shares: int = 1,
) -> tuple[HostBudget, WeightPlacement]:
    """Count what training will need, and decide where weights can lie.

    Args:
        parameters: all of the model's.
        optimizers: those that will train it; none if it is only evaluated.
        kind: see `WeightPlacement`.
        facts: the host.
        num_gpus: number of workers that are GPUs.
        compute_dtype: dtype to which float32 weights are converted for computation; None if they are not.
        largest_unit_bytes: bytes of the largest unit, which is in memory twice for a moment when it is moved.
        gradient_copies: how many gradients of a parameter are in host memory at once.
        delays_updates: whether trainable weights have a copy that workers read.
        num_shares: into how many shares optimizer state is divided, of which one is in this memory.
    """
    parameters = list(parameters)
    files = FileMappings()
    pins = num_gpus > 0 and kind != "pageable"
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    moves = largest_unit_bytes * pins
    needs = [
        HostNeed(
            name="trainable weights",
            num_bytes=_bytes(trained),
            new_bytes=_bytes(parameter for parameter in trained if parameter in files),
            pinned_bytes=_bytes(trained) * (pins and not delays_updates),
        ),
        *(_training_needs(trained, optimizers, gradient_copies, num_shares, pins=num_gpus > 0) if optimizers else ()),
        HostNeed(name="a unit's weights while they move", num_bytes=moves, new_bytes=moves),
    ]

    if delays_updates:
        sizes = (p.element_size() if compute_dtype is None else compute_dtype.itemsize for p in trained)
        delayed = sum(parameter.numel() * size for parameter, size in zip(trained, sizes, strict=True))
        needs.append(
            HostNeed(
                name="delayed copies of trainable weights",
                num_bytes=delayed,
                new_bytes=delayed,
                pinned_bytes=delayed * pins,
                remedies=(('`optimizer_overlap="exact"`', delayed),),
            )
        )
    in_files = _bytes(parameter for parameter in frozen if parameter in files)
    in_memory = _bytes(frozen) - in_files
    stay = kind == "mmap" or (kind == "auto" and num_gpus == 0)
    copies = 0
    if compute_dtype is not None and pins:
        converted = [p for p in frozen if p.dtype is torch.float32 and not (stay and p in files)]
        copies = sum(parameter.numel() for parameter in converted) * compute_dtype.itemsize
    others = sum(need.new_bytes for need in needs) + copies + RING_BYTES * num_gpus
    room = max(0, int((1 - _SPARE) * facts.available_bytes) - others)
    taken = 0 if stay else min(in_files, room) if kind == "auto" else in_files
    ring = RING_BYTES * num_gpus * (kind == "pageable" or taken < in_files)
    needs += [
        HostNeed(
            name="frozen weights",
            num_bytes=in_memory + taken,
            new_bytes=taken,
            pinned_bytes=(in_memory + taken) * pins,
            remedies=(
                ('`RoundPipeStrategy(host_weights="mmap")`', taken),
                ('frozen weights loaded by `load_pretrained`, and `host_weights="mmap"`', in_memory),
            ),
        ),
        HostNeed(
            name="converted copies of frozen weights",
            num_bytes=copies,
            new_bytes=copies,
            pinned_bytes=copies,
            remedies=(("frozen weights in the dtype in which they compute", copies),),
        ),
        HostNeed(name="staging buffers", num_bytes=ring, new_bytes=ring, pinned_bytes=ring),
    ]
    return HostBudget(tuple(needs), facts), WeightPlacement(kind=kind, room_bytes=room)


def _training_needs(
    trained: Sequence[Tensor], optimizers: Sequence[Any], gradient_copies: int, num_shares: int, *, pins: bool
) -> Iterator[HostNeed]:
    weights = _bytes(trained)
    gradients = gradient_copies * weights
    known, guessed = (num_bytes // num_shares for num_bytes in _state_bytes(optimizers))
    there = _bytes(_state_tensors(optimizers))
    in_float32 = _bytes(p for p in trained if p.dtype is torch.float32) / max(1, weights)
    everything = weights + gradients + known + guessed
    yield HostNeed(
        name="gradients",
        num_bytes=gradients,
        new_bytes=max(0, gradients - _bytes(p.grad for p in trained if p.grad is not None and not p.grad.is_sparse)),
        pinned_bytes=gradients * pins,
        remedies=(
            ("adapters (LoRA) in place of training these weights", gradients + known + guessed),
            ('`Trainer(precision="bf16-true")`', int(in_float32 * everything / 2)),
        ),
    )
    yield HostNeed(
        name="optimizer state",
        num_bytes=known,
        new_bytes=max(0, known - there),
        remedies=(("an optimizer that keeps less (`torch.optim.SGD`, `torch.optim.Adafactor`)", known),),
    )
    yield HostNeed(
        name="state of other optimizers",
        num_bytes=guessed,
        new_bytes=max(0, guessed - max(0, there - known)),
        is_estimate=True,
    )


def state_elements(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> int | None:
    """Elements that an optimizer keeps for a parameter, in the parameter's dtype; None for unknown optimizers.

    Source: the `torch.optim` classes of torch 2.6 to 2.13, which make their state in the first step.
    """
    name = next((cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim")), "")
    count = parameter.numel()
    match name:
        case "Adam" | "AdamW":
            return count * (3 if group.get("amsgrad") else 2)
        case "NAdam" | "RAdam" | "SparseAdam" | "Adamax" | "Adadelta" | "Rprop":
            return 2 * count
        case "SGD":
            return count * bool(group.get("momentum"))
        case "Adagrad" | "ASGD" | "Muon":
            return count
        case "RMSprop":
            return count * (1 + bool(group.get("momentum")) + bool(group.get("centered")))
        case "Adafactor":
            if parameter.dim() < 2:
                return count
            return count // max(1, parameter.shape[-1]) + count // max(1, parameter.shape[-2])
        case "LBFGS":
            return count * (2 * int(group.get("history_size", 0)) + 4)
        case _:
            return None


def _state_bytes(optimizers: Sequence[Any]) -> tuple[int, int]:
    """Bytes of the state of optimizers, by class, and of those that are not known, taken to keep two moments."""
    known = guessed = 0
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                elements = state_elements(optimizer, group, parameter)
                if elements is None:
                    guessed += 2 * tensor_bytes(parameter)
                else:
                    known += elements * parameter.element_size()
    return known, guessed


def _state_tensors(optimizers: Sequence[Any]) -> Iterable[Tensor]:
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(tensor_bytes, tensors))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
