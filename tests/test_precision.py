"""The precision plugin: which class it is, what it takes over from Lightning's, and what it leaves in checkpoints."""

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy

# precision: Lightning's class whose kind it is, dtype of computation as Lightning's callbacks see it.
KINDS: dict[str, tuple[type[Precision], torch.dtype]] = {
    "32-true": (Precision, torch.float32),
    "64-true": (DoublePrecision, torch.float64),
    "bf16-true": (HalfPrecision, torch.bfloat16),
    "16-true": (HalfPrecision, torch.float16),
    "bf16-mixed": (MixedPrecision, torch.bfloat16),
    "16-mixed": (MixedPrecision, torch.float16),
}


def scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **kwargs)


@pytest.mark.parametrize("precision", KINDS)
def test_kind(precision: str) -> None:
    plugin = RoundPipePrecision(precision)
    kind, dtype = KINDS[precision]
    assert plugin.precision == precision
    assert isinstance(plugin, RoundPipePrecision)
    assert isinstance(plugin, kind)
    assert [cls for cls in (DoublePrecision, HalfPrecision, MixedPrecision) if isinstance(plugin, cls)] == (
        [] if kind is Precision else [kind]
    )
    assert _plugin_to_compute_dtype(plugin) is dtype


def test_default() -> None:
    assert RoundPipePrecision().precision == "32-true"
    assert RoundPipePrecision(precision="bf16-mixed").precision == "bf16-mixed"


@pytest.mark.parametrize("precision", KINDS)
def test_contexts_and_conversion_are_lightnings(precision: str) -> None:
    plugin, weight = RoundPipePrecision(precision), torch.nn.Linear(1, 1)
    with plugin.tensor_init_context():
        built = torch.ones(1).dtype
    with plugin.forward_context():
        product = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    dtype = KINDS[precision][1]
    assert plugin.convert_module(weight).weight.dtype is (dtype if precision.endswith("true") else torch.float32)
    assert built is (dtype if precision.endswith("true") else torch.float32)
    assert product is dtype
    assert plugin.convert_input(torch.ones(1)).dtype is (dtype if precision.endswith("true") else torch.float32)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("precision", ["16", "bf16", "transformer-engine", "", 32])
def test_other_precisions_are_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=r"must be one of '32-true', .*'16-mixed', but got") as caught:
        RoundPipePrecision(precision)
    caught.match(f"got {precision!r}")


@pytest.mark.parametrize("precision", sorted(KINDS.keys() - {"16-mixed"}))
def test_a_scaler_goes_with_float16_only(precision: str) -> None:
    with pytest.raises(ValueError, match=f"goes with `precision='16-mixed'` only, but got '{precision}'"):
        RoundPipePrecision(precision, scaler=scaler())


@pytest.mark.parametrize("precision", [precision for precision in KINDS if precision.endswith("true")])
def test_half_weights_go_with_mixed_precision_only(precision: str) -> None:
    with pytest.raises(ValueError, match=f"mixed precision only, but got `precision='{precision}'`"):
        RoundPipePrecision(precision, half_weights=True)


def test_a_class_of_ones_own_is_refused() -> None:
    """It would get an instance of another class: there is one for each precision."""

    class Mine(RoundPipePrecision):
        pass

    with pytest.raises(TypeError, match="Mine must not derive from RoundPipePrecision"):
        Mine("32-true")


# -------------------------------------------------------------------------------------------------------- compute dtype


@pytest.mark.parametrize("precision", KINDS)
def test_weights_are_computed_with_as_they_are(precision: str) -> None:
    """As autocast does, which casts them where it asks for it."""
    assert RoundPipePrecision(precision).compute_dtype is None


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_weights_are_cast_everywhere(precision: str) -> None:
    plugin = RoundPipePrecision(precision, half_weights=True)
    assert plugin.compute_dtype is KINDS[precision][1]
    assert copy.deepcopy(plugin).compute_dtype is KINDS[precision][1]
    assert plugin.convert_module(torch.nn.Linear(1, 1)).weight.dtype is torch.float32


# ----------------------------------------------------------------------------------------------------------- loss scale


@pytest.mark.parametrize("precision", sorted(KINDS.keys() - {"16-mixed"}))
def test_no_loss_scale(precision: str) -> None:
    assert RoundPipePrecision(precision).loss_scale == 1.0


def test_loss_scale() -> None:
    assert RoundPipePrecision("16-mixed").loss_scale == scaler().get_scale() == 2.0**16
    assert RoundPipePrecision("16-mixed", scaler=scaler(init_scale=8.0)).loss_scale == 8.0


# ---------------------------------------------------------------------------------------------------------------- adopt


@pytest.mark.parametrize(
    "plugin, precision",
    [
        (None, "32-true"),
        (Precision(), "32-true"),
        (DoublePrecision(), "64-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (MixedPrecision("16-mixed", "cpu", scaler()), "16-mixed"),
    ],
)
def test_lightnings_plugins_are_adopted(plugin: Precision | None, precision: str) -> None:
    adopted = RoundPipePrecision.adopt(plugin)
    assert type(adopted) is type(RoundPipePrecision(precision))
    assert adopted.precision == precision


def test_our_own_is_kept() -> None:
    plugin = RoundPipePrecision("16-mixed")
    assert RoundPipePrecision.adopt(plugin) is plugin


def test_settings_of_an_adopted_plugin() -> None:
    """Autocast stays on the device that Lightning chose, and the scaler's settings go with it."""
    given = scaler(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    adopted = RoundPipePrecision.adopt(MixedPrecision("16-mixed", "cuda", given))
    assert isinstance(adopted, MixedPrecision)
    assert adopted.device == "cuda"
    found = adopted.scaler
    assert found is not None
    settings = (
        found.get_scale(), found.get_growth_factor(), found.get_backoff_factor(), found.get_growth_interval(),
    )  # fmt: skip
    assert settings == (8.0, 3.0, 0.25, 7)


def test_an_adopted_scaler_goes_on_where_it_was() -> None:
    given = scaler(init_scale=8.0, growth_interval=7)
    given.scale(torch.ones(()))
    given.load_state_dict({**given.state_dict(), "_growth_tracker": 5})
    adopted = RoundPipePrecision.adopt(MixedPrecision("16-mixed", "cpu", given))
    assert adopted.state_dict() == given.state_dict()


def test_an_adopted_scaler_works_on_host_gradients() -> None:
    """Whatever device the plugin's own was made for."""
    adopted = RoundPipePrecision.adopt(MixedPrecision("16-mixed", "cpu", scaler(init_scale=4.0)))
    assert isinstance(adopted, MixedPrecision)
    assert adopted.scaler is not None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([4.0])
    adopted.scaler.scale(torch.ones(()))
    adopted.scaler.step(optimizer)
    adopted.scaler.update()
    assert weight.item() == 0.0


class OtherPrecision(Precision):
    """A plugin of somebody else."""


@pytest.mark.parametrize("plugin", [OtherPrecision(), FSDPPrecision("bf16-mixed")])
def test_foreign_plugins_are_refused(plugin: Precision) -> None:
    with pytest.raises(MisconfigurationException, match=type(plugin).__name__) as caught:
        RoundPipePrecision.adopt(plugin)
    caught.match("with one of '32-true'")


def test_the_strategy_adopts() -> None:
    strategy = RoundPipeStrategy(precision_plugin=HalfPrecision("bf16-true"))
    assert isinstance(strategy.precision_plugin, RoundPipePrecision)
    assert strategy.precision_plugin.precision == "bf16-true"
    assert strategy.precision_plugin is strategy.precision_plugin
    with pytest.raises(MisconfigurationException, match="OtherPrecision"):
        RoundPipeStrategy(precision_plugin=OtherPrecision())


# -------------------------------------------------------------------------------------------------- copies, checkpoints


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
@pytest.mark.parametrize("precision", KINDS)
def test_copies(precision: str, duplicate: Any) -> None:
    plugin = RoundPipePrecision(precision)
    copied = duplicate(plugin)
    assert copied is not plugin
    assert type(copied) is type(plugin)
    assert copied.precision == precision
    assert copied.loss_scale == plugin.loss_scale
    assert _plugin_to_compute_dtype(copied) is KINDS[precision][1]


def checkpoint_of(plugin: Precision) -> dict[str, Any]:
    """What Lightning writes, in its order."""
    checkpoint: dict[str, Any] = {}
    if state := plugin.state_dict():
        checkpoint[type(plugin).__qualname__] = state
    plugin.on_save_checkpoint(checkpoint)
    return checkpoint


def restore(plugin: Precision, checkpoint: dict[str, Any]) -> None:
    """What Lightning does with it, in its order."""
    plugin.on_load_checkpoint(checkpoint)
    if type(plugin).__qualname__ in checkpoint:
        plugin.load_state_dict(checkpoint[type(plugin).__qualname__])


def used(plugin: Precision) -> Precision:
    """With a scaler whose scale has changed."""
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    plugin.scaler.scale(torch.ones(()))
    plugin.scaler.update(2.0)
    return plugin


@pytest.mark.parametrize("ours_saves", [True, False])
@pytest.mark.parametrize("ours_loads", [True, False])
def test_the_scaler_goes_through_checkpoints_of_both_plugins(ours_saves: bool, ours_loads: bool) -> None:
    def build(ours: bool) -> Precision:
        return RoundPipePrecision("16-mixed") if ours else MixedPrecision("16-mixed", "cpu", scaler())

    loaded = build(ours_loads)
    restore(loaded, checkpoint_of(used(build(ours_saves))))
    assert isinstance(loaded, MixedPrecision)
    assert loaded.scaler is not None
    assert loaded.scaler.get_scale() == 2.0


def test_both_names_are_in_our_checkpoint() -> None:
    plugin = used(RoundPipePrecision("16-mixed"))
    checkpoint = checkpoint_of(plugin)
    assert checkpoint.keys() == {type(plugin).__qualname__, "MixedPrecision"}
    assert checkpoint["MixedPrecision"] == checkpoint[type(plugin).__qualname__]


def test_our_own_name_wins() -> None:
    checkpoint = checkpoint_of(used(RoundPipePrecision("16-mixed")))
    checkpoint["MixedPrecision"] = {**checkpoint["MixedPrecision"], "scale": 32.0}
    loaded = RoundPipePrecision("16-mixed")
    restore(loaded, checkpoint)
    assert loaded.loss_scale == 2.0


@pytest.mark.parametrize("precision", sorted(KINDS.keys() - {"16-mixed"}))
def test_without_a_scaler_nothing_is_written(precision: str) -> None:
    plugin = RoundPipePrecision(precision)
    assert checkpoint_of(plugin) == {}
    restore(plugin, {})
