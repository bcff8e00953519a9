"""What a training step's output contributes: its loss, and the share of the batch that the loss stands for."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_roundpipe.runtime.microbatch import MicroBatch, valid_label_counts

__all__ = ["LOSS_WEIGHT_RULES", "BatchObjective", "LossWeight", "loss_of"]

LOSS_WEIGHT_RULES = ("auto", "samples", "tokens")

LossWeight = str | Callable[[Any], float]
"""``"auto"``, ``"samples"``, ``"tokens"``, or a function of a micro-batch that returns its weight."""


_MISSING = object()


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned.

    Raises:
        TypeError: the output is neither None, a tensor, nor a mapping with a tensor under ``"loss"``.
    """
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("loss", _MISSING), Tensor | None):
        return output["loss"]  # type: ignore[no-any-return]
    raise TypeError(
        "`training_step` must return a loss tensor, a dict with a tensor under 'loss', or None, but it returned"
        f" {type(output).__name__}{f' with keys {sorted(map(str, output))}' if isinstance(output, Mapping) else ''}."
    )


class BatchObjective:
    """The loss of a batch as the weighted mean of the losses of its micro-batches.

    ``training_step`` returns a mean over its micro-batch. The mean over the batch is the mean of those weighted by what
    each was taken over: samples, or, where labels are ignored, the labels that are not. A causal language model
    averages over all positions but the first (its labels are shifted by one); which of the two applies is seen from the
    cross-entropy that the first micro-batch runs.

    Args:
        rule: see `RoundPipeStrategy(loss_weight=...)`.
        micro_batches: the batch.
        root: the model; its class names decide where no cross-entropy is seen.
        labels_shifted: what an earlier step found, None if nothing yet.
        scale: factor on every loss before its backward.
        watch: observe every step, to tell the losses which an evaluating step only logs.

    Attributes:
        seen: for each micro-batch the first cross-entropy that it computed, where ``watch`` asks for it.

    Threading: a step's micro-batches call this from their threads. The shares are fixed when the first one asks.

    Raises:
        ValueError: a function gave weights that are negative, not finite, or all 0.
    """

    def __init__(
        self,
        rule: LossWeight,
        micro_batches: Sequence[MicroBatch],
        root: nn.Module,
        labels_shifted: bool | None = None,
        scale: float = 1.0,
        watch: bool = False,
    ) -> None:
        self.scale = scale
        self.seen: list[Tensor | None] = [None] * len(micro_batches)
        self._watch = watch
        self.labels_shifted = labels_shifted
        self._root = root
        self._lock = threading.Lock()
        self._shares: list[float] | None = None
        self._weights = [float(micro_batch.num_samples) for micro_batch in micro_batches]
        self._labels: dict[bool, list[int]] = {}
        if callable(rule):
            self._weights = [float(rule(micro_batch.data)) for micro_batch in micro_batches]
            if not all(math.isfinite(weight) and weight >= 0 for weight in self._weights) or not any(self._weights):
                raise ValueError(
                    "`loss_weight` must give every micro-batch a finite weight of at least 0, and not 0 to all, but"
                    f" gave {self._weights}."
                )
        elif rule in ("auto", "tokens"):
            counts = {shifted: valid_label_counts(micro_batches, shifted) for shifted in (False, True)}
            self._labels = {shifted: count for shifted, count in counts.items() if count is not None}

    def loss(self, output: Any) -> Tensor | None:
        """The loss in what ``training_step`` returned."""
        return loss_of(output)

    def observe(self, index: int, losses: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Decide from the label counts of the cross-entropies that micro-batch ``index`` computed."""
        if not self._labels:
            return
        if self._watch and losses:
            self.seen[index] = losses[0][0]
        if self.labels_shifted is not None or index != 0:
            return  # One micro-batch decides, always the same: the others may be observed in any order.
        label_counts = [int(count) for _, count in losses]
        plain, shifted = self._labels[False][index], self._labels[True][index]
        if (plain in label_counts) != (shifted in label_counts):
            self.labels_shifted = shifted in label_counts

    def share(self, index: int) -> float:
        """The share of micro-batch ``index``."""
        return self.shares()[index]

    def shares(self) -> list[float]:
        """The shares of all micro-batches; they sum to 1."""
        with self._lock:
            if self._shares is None:
                weights: Sequence[float] = self._weights
                if self._labels:
                    shifted = self.labels_shifted if self.labels_shifted is not None else _is_causal(self._root)
                    # Without a single label plain training divides by zero; so do we, sample by sample.
                    weights = self._labels[shifted] if any(self._labels[shifted]) else weights
                self._shares = [weight / sum(weights) for weight in weights]
            return self._shares


def _is_causal(root: nn.Module) -> bool:
    return any(marker in type(module).__name__ for module in root.modules() for marker in ("CausalLM", "LMHeadModel"))
