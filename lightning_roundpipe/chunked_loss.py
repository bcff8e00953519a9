"""Lets causal language models of transformers compute head and loss chunk by chunk, without a change of their code.

Such a model runs ``logits = head(hidden)`` and then ``loss_function(logits, labels, ...)``. While the loss is chunked,
the head hands its inputs on, and the loss function multiplies with the head's weight itself. Whatever stands between
the two would work on the wrong numbers, so it is seen to that nothing does.
"""

import importlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.exceptions import UnsupportedUseError
from lightning_roundpipe.losses import linear_cross_entropy

__all__ = ["KERNELS", "chunked_causal_lm_loss", "liger_is_installed"]

KERNELS = ("auto", "torch", "compiled", "liger")

_LIGER = "liger_kernel.transformers.functional"
_INSTEAD = (
    "Use `RoundPipeStrategy(chunked_loss=False)`, and `lightning_roundpipe.losses.linear_cross_entropy` in"
    " `training_step` where the model allows it."
)

LossKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], Tensor]
"""From inputs of the head, its weight, labels, its bias and the label to ignore to the mean loss."""


def liger_is_installed() -> bool:
    """Whether Liger's kernels can be imported."""
    try:
        importlib.import_module(_LIGER)
    except ImportError:
        return False
    return True


def _torch_kernel(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, bias=bias, ignore_index=ignore_index)


def _compiled_kernel(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, bias=bias, ignore_index=ignore_index, compiled=True)


def _liger_kernel(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    if hidden.device.type == "cpu":
        return _torch_kernel(hidden, weight, labels, bias, ignore_index)
    fused = importlib.import_module(_LIGER).liger_fused_linear_cross_entropy
    if torch.is_autocast_enabled(hidden.device.type):
        # The kernel computes in the dtype of its arguments.
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result = fused(hidden, weight, labels, bias=bias, ignore_index=ignore_index)
    loss: Tensor = result if isinstance(result, Tensor) else result[0]
    return loss


@contextmanager
def chunked_causal_lm_loss(root: nn.Module, kernel: str = "torch") -> Iterator[None]:
    """Let causal language models below ``root`` that are called with labels compute head and loss chunk by chunk.

    Their output then has the loss, and None in the place of the logits. Calls without labels are as ever.

    Args:
        root: holds the models; as they are, or in a wrapper of peft's.
        kernel: ``"torch"``: this package's; ``"compiled"``: the same, compiled; ``"liger"``: Liger's fused one, on
            GPUs.

    Raises:
        UnsupportedUseError: there is no such model, or one whose head or loss is not the usual one.
    """
    models = [module for module in root.modules() if _is_causal_lm(module)]
    if not models:
        raise UnsupportedUseError(
            "`chunked_loss` is for causal language models of transformers (`...ForCausalLM`), but there is none in"
            f" {type(root).__name__}. {_INSTEAD}"
        )
    kernels = {"compiled": _compiled_kernel, "liger": _liger_kernel}
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_Chunked(model, kernels.get(kernel, _torch_kernel)).installed())
        yield


def _is_causal_lm(module: nn.Module) -> bool:
    name = type(module).__name__
    return hasattr(module, "loss_function") and name.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    )


@dataclass(eq=False)
class _Pending:
    """A call of a model with labels that is under way.

    Attributes:
        owner: of which model.
        passed: what its head has handed on.
        used: whether the loss was taken.
    """

    owner: "_Chunked"
    passed: Tensor | None = None
    used: bool = False


# Of a context, not of a thread: the head runs again in recomputation, in the context of its call.
_pending: ContextVar[_Pending | None] = ContextVar("_pending", default=None)


class _Chunked:
    """One model whose loss is chunked."""

    def __init__(self, model: Any, kernel: LossKernel) -> None:
        self._model = model
        self._kernel = kernel
        self._head = self._find_head()
        self._loss_function = model.loss_function
        self._forward, self._head_forward = model.forward, self._head.forward

    def _find_head(self) -> Any:
        name = type(self._model).__name__
        head = self._model.get_output_embeddings()
        if hasattr(head, "modules_to_save") and hasattr(head, "active_adapters"):  # peft's copy that trains
            head = head.modules_to_save[head.active_adapters[0]]
        if type(head) is not nn.Linear:
            raise UnsupportedUseError(
                f"`chunked_loss` needs a head that is an `nn.Linear`, but that of {name} is a {type(head).__name__}."
                f" {_INSTEAD}"
            )
        loss_function = self._model.loss_function
        if getattr(loss_function, "__name__", "") != "ForCausalLMLoss":
            raise UnsupportedUseError(
                f"`chunked_loss` replaces the ordinary loss of causal language models, but that of {name} is"
                f" {getattr(loss_function, '__name__', loss_function)!r}. {_INSTEAD}"
            )
        return head

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the model's forward, its head's and its loss function."""
        places = [(self._model, "forward"), (self._head, "forward"), (self._model, "_loss_function")]
        before = [vars(owner).get(name) for owner, name in places]
        # Not bound methods of this object: traits of units look at what modules hold.
        replacements = [partial(method) for method in (self.forward, self.pass_on, self.loss)]
        try:
            for (owner, name), replacement in zip(places, replacements, strict=True):
                vars(owner)[name] = replacement
            yield
        finally:
            for (owner, name), value in zip(places, before, strict=True):
                if value is None:
                    vars(owner).pop(name, None)
                else:
                    vars(owner)[name] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; without logits if there are labels."""
        wanted = kwargs.get("labels") is not None and torch.is_grad_enabled()
        pending = _Pending(self) if wanted else None
        token = _pending.set(pending)
        try:
            output = self._forward(*args, **kwargs)
        finally:
            _pending.reset(token)
        if pending is None:
            return output
        if not pending.used:
            raise self._between()
        if isinstance(output, MutableMapping):
            output["logits"] = None
            return output
        loss, _, *rest = output
        return (loss, None, *rest)

    def pass_on(self, hidden: Tensor) -> Tensor:
        """Stand in for the head: hand its inputs on."""
        pending = _pending.get()
        if pending is None or pending.owner is not self:
            output: Tensor = self._head_forward(hidden)
            return output
        pending.passed = hidden.view_as(hidden)
        return pending.passed

    def loss(self, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        """Stand in for the loss function: ``logits`` are the inputs of the head."""
        pending = _pending.get()
        if pending is None or pending.owner is not self:
            original: Tensor = self._loss_function(logits, labels, vocab_size, **kwargs)
            return original
        passed, pending.passed, pending.used = pending.passed, None, True
        if passed is None or (logits.shape, logits.dtype) != (passed.shape, passed.dtype):
            raise self._between()
        # The same memory, not the same object: a unit's outputs are given to user code without the unit's graph.
        untouched = logits.data_ptr() == passed.data_ptr() and logits._version == passed._version
        if not untouched and not self._is_scaled(logits, passed):
            raise self._between()
        ignore_index = kwargs.get("ignore_index", -100)
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shifted = shifted.to(logits.device).reshape(-1)
        hidden = logits.reshape(-1, logits.shape[-1])
        loss = self._kernel(hidden, self._head.weight, shifted, self._head.bias, ignore_index)
        if (num_items := kwargs.get("num_items_in_batch")) is not None:
            loss = loss * (shifted != ignore_index).sum() / num_items
        return loss

    @torch.no_grad()
    def _is_scaled(self, logits: Tensor, passed: Tensor) -> bool:
        """Whether the model has scaled the logits as its config says (Granite, Cohere): inputs scale like them."""
        if self._head.bias is not None:
            return False
        config = self._model.config
        by: dict[str, Callable[[Tensor, float], Tensor]] = {"logits_scaling": torch.div, "logit_scale": torch.mul}
        factors = [(scale, getattr(config, name)) for name, scale in by.items() if hasattr(config, name)]
        return any(torch.equal(scale(passed, factor), logits) for scale, factor in factors)

    def _between(self) -> UnsupportedUseError:
        return UnsupportedUseError(
            "`chunked_loss` needs a model whose loss is taken of what its head returns, but"
            f" {type(self._model).__name__} does something to the logits in between (a scale, a cap). {_INSTEAD}"
        )
