"""Caches and the model's own checkpointing are off while a step runs, and only then."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_roundpipe.runtime.hazards import switched_off


class WithConfig(nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(1, 1)
        self.inner.config = config


class Checkpointing(nn.Module):
    def __init__(self, on: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = on


def test_cache_is_off_inside_and_on_afterwards() -> None:
    warnings: list[str] = []
    config = SimpleNamespace(use_cache=True)
    with switched_off(WithConfig(config), warnings.append):
        assert config.use_cache is False
    assert config.use_cache is True
    assert len(warnings) == 1
    assert "`config.use_cache`" in warnings[0]


def test_own_checkpointing_is_off_inside_and_on_afterwards() -> None:
    warnings: list[str] = []
    model = nn.ModuleList([Checkpointing(True), Checkpointing(False), Checkpointing(True)])
    with switched_off(model, warnings.append):
        assert [module.gradient_checkpointing for module in model] == [False, False, False]
    assert [module.gradient_checkpointing for module in model] == [True, False, True]
    assert len(warnings) == 1
    assert "gradient checkpointing is off" in warnings[0]


@pytest.mark.parametrize("value", [False, None, "static"])
def test_other_settings_are_left_alone(value: object) -> None:
    warnings: list[str] = []
    config = SimpleNamespace(use_cache=value)
    with switched_off(nn.ModuleList([WithConfig(config), WithConfig(None), nn.ReLU()]), warnings.append):
        assert config.use_cache == value
    assert config.use_cache == value
    assert not warnings


def test_settings_are_back_after_an_error() -> None:
    config = SimpleNamespace(use_cache=True)
    model = nn.ModuleList([WithConfig(config), Checkpointing(True)])
    with pytest.raises(KeyError), switched_off(model, lambda _: None):
        raise KeyError
    assert config.use_cache is True
    assert model[1].gradient_checkpointing is True


def test_a_real_model_is_switched() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    model.gradient_checkpointing_enable()
    warnings: list[str] = []
    assert model.is_gradient_checkpointing
    with switched_off(model, warnings.append):
        assert not model.is_gradient_checkpointing
        assert not model.config.use_cache
    assert model.is_gradient_checkpointing
    assert model.config.use_cache
    assert len(warnings) == 2
