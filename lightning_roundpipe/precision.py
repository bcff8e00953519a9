"""Precision of streamed training: where autocast runs, and loss scaling for gradients that live on the host."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = ["RoundPipePrecision"]

_LIGHTNING_KEY = MixedPrecision.__qualname__


class RoundPipePrecision(Precision):
    """The precision plugin of `RoundPipeStrategy`; ``Trainer(precision=...)`` selects it by itself.

    ============ ================ ================ ============== =====================================
    precision    host weights     gradients        activations    notes
    ============ ================ ================ ============== =====================================
    32-true      as built         as the weights   as the weights
    64-true      float64          float64          float64
    bf16-true    bfloat16         bfloat16         bfloat16       summed over micro-batches in float32
    16-true      float16          float16          float16        summed over micro-batches in float32
    bf16-mixed   as built         as the weights   autocast
    16-mixed     as built         as the weights   autocast       the loss is scaled
    ============ ================ ================ ============== =====================================

    Args:
        precision: one of the above.
        half_weights: with mixed precision, compute with weights in half precision everywhere, not only where autocast
            asks for it, as FSDP's mixed precision does. Activations between layers are then in half precision, too:
            faster, and rounded once more. The host weights and the gradients stay as they are.
        scaler: for ``"16-mixed"``, the gradient scaler; by default one with PyTorch's default settings. It must work on
            host tensors: ``torch.amp.GradScaler("cpu", ...)``.

    Raises:
        ValueError: the precision is not one of the above, or does not go with a scaler or with ``half_weights``.
        TypeError: a class of one's own was derived from this one.
    """

    norm_clipper: Callable[[float], bool] | None = None
    """What clips the gradients of the optimizer that is being stepped, given their greatest norm; or returns False."""

    def __new__(
        cls, precision: str = "32-true", *, half_weights: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> "RoundPipePrecision":
        """Make an instance of the class for ``precision``; Lightning's callbacks tell plugins apart by class."""
        if precision not in _CLASSES:
            raise ValueError(f"`precision` must be one of {', '.join(map(repr, _CLASSES))}, but got {precision!r}.")
        if scaler is not None and precision != "16-mixed":
            raise ValueError(f"`scaler` goes with `precision='16-mixed'` only, but got {precision!r}.")
        if half_weights and not precision.endswith("-mixed"):
            raise ValueError(f"`half_weights` goes with mixed precision only, but got `precision={precision!r}`.")
        if cls not in (RoundPipePrecision, *_CLASSES.values()):
            raise TypeError(
                f"{cls.__name__} must not derive from RoundPipePrecision: it is one class for each precision."
            )
        return super().__new__(_CLASSES[precision])

    def __init__(
        self, precision: str = "32-true", *, half_weights: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.precision,)

    @property
    def loss_scale(self) -> float:
        """The factor that keeps small float16 gradients from vanishing; 1 for other precisions."""
        return 1.0

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype to which float32 weights are converted for computation; None to leave them."""
        return None

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip, unless that is done in the background."""
        if self.norm_clipper is None or not self.norm_clipper(clip_val):
            super().clip_grad_by_norm(optimizer, clip_val)

    @staticmethod
    def adopt(plugin: Precision | None) -> "RoundPipePrecision":
        """The plugin of this package that does what one of Lightning's own does.

        Raises:
            MisconfigurationException: the plugin belongs to another strategy or library.
        """
        if plugin is None:
            return RoundPipePrecision()
        if isinstance(plugin, RoundPipePrecision):
            return plugin
        if type(plugin) is MixedPrecision:
            scaler = None
            if plugin.scaler is not None:
                scaler = torch.amp.GradScaler(
                    "cpu", enabled=plugin.scaler.is_enabled() or not torch.cuda.is_available()
                )
                scaler.load_state_dict(plugin.scaler.state_dict() or scaler.state_dict())
            adopted = RoundPipePrecision(plugin.precision, scaler=scaler)
            assert isinstance(adopted, _RoundPipeMixed)
            adopted.device = plugin.device
            return adopted
        if type(plugin) in (Precision, HalfPrecision, DoublePrecision):
            return RoundPipePrecision(str(plugin.precision))
        raise MisconfigurationException(
            f"RoundPipeStrategy does not work with the precision plugin {type(plugin).__name__}. Use"
            f" `Trainer(precision=...)` with one of {', '.join(map(repr, _CLASSES))}."
        )


class _RoundPipeHalf(RoundPipePrecision, HalfPrecision):
    def __init__(self, precision: Any = "bf16-true", *, half_weights: bool = False, scaler: None = None) -> None:
        HalfPrecision.__init__(self, precision)


class _RoundPipeDouble(RoundPipePrecision, DoublePrecision):
    def __init__(self, precision: str = "64-true", *, half_weights: bool = False, scaler: None = None) -> None:
        DoublePrecision.__init__(self)


class _RoundPipeMixed(RoundPipePrecision, MixedPrecision):
    """Autocast on the workers' devices. Gradients are on the host, so the scaler works there."""

    def __init__(
        self,
        precision: Any = "bf16-mixed",
        *,
        half_weights: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if precision == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler("cpu")
        MixedPrecision.__init__(self, precision, "cpu", scaler)
        self._half_weights = half_weights

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    @property
    def compute_dtype(self) -> torch.dtype | None:
        if not self._half_weights:
            return None
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip; a fused optimizer stands in the way only where there is a loss scale for it to take out."""
        if self.scaler is None:
            Precision.clip_gradients(self, optimizer, *args, **kwargs)
        else:
            super().clip_gradients(optimizer, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the scaler also under the name by which Lightning's own plugin finds it."""
        if self.scaler is not None:
            checkpoint[_LIGHTNING_KEY] = self.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the scaler from a checkpoint of Lightning's own plugin."""
        if type(self).__qualname__ not in checkpoint and _LIGHTNING_KEY in checkpoint:
            self.load_state_dict(checkpoint[_LIGHTNING_KEY])


_CLASSES: dict[str, type[RoundPipePrecision]] = {
    "32-true": RoundPipePrecision,
    "64-true": _RoundPipeDouble,
    "bf16-true": _RoundPipeHalf,
    "16-true": _RoundPipeHalf,
    "bf16-mixed": _RoundPipeMixed,
    "16-mixed": _RoundPipeMixed,
}
