"""``RoundPipeStrategy(chunked_loss=True)``: the numbers of the plain loss, or a refusal; nothing is left behind."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.chunked_loss import chunked_causal_lm_loss
from lightning_roundpipe.exceptions import UnsupportedUseError
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import CASES, LanguageModel, Residual, residual_batches, seeded, token_batches

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


def balanced_moe() -> LanguageModel:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    config._experts_implementation = "eager"
    return LanguageModel(transformers.Qwen3MoeForCausalLM(config))


def with_bias() -> LanguageModel:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.PhiConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    return LanguageModel(transformers.PhiForCausalLM(config))


MODELS: dict[str, Callable[[], Any]] = {
    "tied": CASES["qwen3_tied"].module,
    "lora_with_trained_head": CASES["llama_lora"].module,
    "gpt2": CASES["gpt2"].module,
    "balanced_moe": balanced_moe,
    "bias": with_bias,
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_training(name: str) -> None:
    build = lambda: seeded(MODELS[name])  # noqa: E731
    batches = token_batches(num=3, ignored=name != "balanced_moe")
    expected = train(build, batches)
    num_microbatches = 1 if name == "balanced_moe" else 3
    found = train(build, batches, RoundPipeStrategy(num_microbatches=num_microbatches, chunked_loss=True), devices=2)
    assert_results_close(expected, found, rtol=2e-5)
    assert not any("forward" in vars(module) for module in found.module.modules())


def test_logits_are_never_formed() -> None:
    formed = []

    class Watched(LanguageModel):
        def loss(self, batch: Any) -> Tensor:
            output = self.model(**batch)
            formed.append(output.logits)
            return output.loss

    build = lambda: seeded(lambda: Watched(CASES["qwen3_tied"].module().model))  # noqa: E731
    train(build, token_batches(num=1), RoundPipeStrategy(num_microbatches=2, chunked_loss=True))
    assert formed == [None, None]


def test_calls_without_labels_and_tuples() -> None:
    model = seeded(MODELS["tied"]).model
    batch = token_batches(num=1)[0]
    expected = model(**batch)
    with chunked_causal_lm_loss(model):
        torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, expected.logits)
        loss, logits = model(**batch, return_dict=False)[:2]
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, expected.logits)
    torch.testing.assert_close(loss, expected.loss)
    assert logits is None
    summed = model(**batch, num_items_in_batch=torch.tensor(7)).loss
    with chunked_causal_lm_loss(model):
        torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(7)).loss, summed)


def granite() -> LanguageModel:
    return LanguageModel(transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=4.0)))


def cohere() -> LanguageModel:
    return LanguageModel(transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.25)))


@pytest.mark.parametrize("build", [granite, cohere])
def test_scaled_logits(build: Callable[[], LanguageModel]) -> None:
    expected = train(lambda: seeded(build), token_batches(num=2))
    strategy = RoundPipeStrategy(num_microbatches=2, chunked_loss=True)
    assert_results_close(expected, train(lambda: seeded(build), token_batches(num=2), strategy, devices=2), rtol=2e-5)


def capped() -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8))


def scaled_twice() -> nn.Module:
    """The config says less than what the model does."""
    model = granite().model
    model.lm_head.register_forward_hook(lambda module, arguments, output: 2 * output)
    return model


@pytest.mark.parametrize("build", [capped, scaled_twice])
def test_what_stands_between_head_and_loss_is_refused(build: Callable[[], nn.Module]) -> None:
    model = build()
    with (
        pytest.raises(UnsupportedUseError, match="does something to the logits in between"),
        chunked_causal_lm_loss(model),
    ):
        model(**token_batches(num=1)[0])
    model(**token_batches(num=1)[0]).loss.backward()


def test_models_of_another_kind_are_refused() -> None:
    with pytest.raises(UnsupportedUseError, match="there is none in Residual"):
        train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=2, chunked_loss=True))


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="`chunked_loss` must be a bool or one of auto, torch, compiled, liger"):
        RoundPipeStrategy(chunked_loss="triton")


def test_liger_that_is_not_installed_is_refused() -> None:
    with mock.patch.dict(sys.modules, {"liger_kernel": None}), pytest.raises(ValueError, match="pip install liger"):
        RoundPipeStrategy(chunked_loss="liger")


def test_liger_is_taken_where_it_is_installed() -> None:
    """On the CPU this package's own kernel computes all the same."""
    build, batches = MODELS["tied"], token_batches(num=1)
    with mock.patch("lightning_roundpipe.strategy.liger_is_installed", return_value=True):
        strategy = RoundPipeStrategy(num_microbatches=2, chunked_loss=True)
        found = train(build, batches, strategy)
    assert strategy._chunked_loss == "liger"
    assert_results_close(train(build, batches), found, rtol=2e-5)


def test_liger_is_given_what_it_asks_for() -> None:
    """With a stand-in for the library, and tensors that are not on the CPU, where its kernels do not run."""
    from lightning_roundpipe import chunked_loss

    asked = []

    def fused(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
        asked.append((hidden.dtype, weight.dtype, target.dtype, bias, ignore_index))
        return hidden.sum()

    library = ModuleType("functional")
    library.liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    with (
        torch.device("meta"),
        mock.patch("torch.is_autocast_enabled", return_value=True),
        mock.patch("torch.get_autocast_dtype", return_value=torch.bfloat16),
        mock.patch.object(chunked_loss.importlib, "import_module", return_value=library),
    ):
        chunked_loss._liger_kernel(torch.ones(6, 4), torch.ones(10, 4), torch.ones(6, dtype=torch.long), None, -100)
    assert asked == [(torch.bfloat16, torch.bfloat16, torch.int64, None, -100)]
