"""Models that peft adapts: what trains equals plain Lightning, what is frozen costs nothing, what is saved is right."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import UnsupportedUseError
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.models import LanguageModel, seeded, token_batches

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# Advice of peft's on combinations that are here on purpose.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{start}:UserWarning")
    for start in ("Unsupported layer type", "Model has `tie_word_embeddings=True`", "fan_in_fan_out is set to")
]

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
PROJECTIONS = ["q_proj", "v_proj"]
CAUSAL = "CAUSAL_LM"


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen3_tied() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    return transformers.Qwen3MoeForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2, bos_token_id=1, eos_token_id=1, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "lora_embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "lora_biases": lambda: peft.LoraConfig(r=4, bias="all", target_modules=PROJECTIONS),
    "lora_tokens": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, trainable_token_indices=[1, 2, 3]),
    "lora_whole_modules": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, modules_to_save=["embed_tokens", "lm_head"]
    ),
    "lora_tied_modules": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "lora_parameters": lambda: peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=[*PROJECTIONS, "down_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=[*PROJECTIONS, "down_proj"], feedforward_modules=["down_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=100, target_modules=PROJECTIONS),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=PROJECTIONS),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=PROJECTIONS),
    "layer_norm": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=4),
    "prompt_encoder": lambda: peft.PromptEncoderConfig(task_type=CAUSAL, num_virtual_tokens=4, encoder_hidden_size=16),
    "adaption_prompt": lambda: peft.AdaptionPromptConfig(task_type=CAUSAL, adapter_len=4, adapter_layers=2),
}
TIED = ("lora_embedding", "lora_tokens", "lora_whole_modules", "lora_tied_modules")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{f"llama-{name}": (llama, config) for name, config in CONFIGS.items() if name != "lora_tied_modules"},
    **{f"tied-{name}": (qwen3_tied, CONFIGS[name]) for name in TIED},
    "gpt2-lora": (gpt2, CONFIGS["lora"]),
    "gpt2-prompt": (gpt2, CONFIGS["prompt"]),
    "moe-attention": (qwen3_moe, lambda: peft.LoraConfig(r=2, target_modules=PROJECTIONS)),
    "moe-experts": (
        qwen3_moe,
        lambda: peft.LoraConfig(r=2, target_modules=PROJECTIONS, target_parameters=EXPERTS),
    ),
}  # fmt: skip


def adapted(name: str) -> Callable[[], LanguageModel]:
    """A factory of the named pair of model and method, in float64: a term that is missing can not hide in rounding."""
    base, config = PAIRS[name]
    return lambda: seeded(lambda: LanguageModel(peft.get_peft_model(base(), config())).double())


@pytest.mark.parametrize("name", PAIRS)
def test_equals_plain_training(name: str) -> None:
    build = adapted(name)
    expected = train(build, token_batches(num=3))
    found = train(build, token_batches(num=3), RoundPipeStrategy(num_microbatches=3), devices=2)
    assert_results_close(expected, found, rtol=1e-9)
    start = build()
    trained = {key for key, parameter in start.named_parameters() if parameter.requires_grad}
    same = {key for key, parameter in start.named_parameters() if torch.equal(parameter, found.state[key])}
    assert trained and trained.isdisjoint(same), "something that should train did not"


@pytest.mark.parametrize(
    "name", ["llama-lora", "llama-dora", "llama-ia3", "tied-lora_tied_modules", "llama-prompt", "moe-experts"]
)
def test_what_is_saved_and_merged_is_what_was_trained(name: str, tmp_path: Path) -> None:
    found = train(adapted(name), token_batches(num=2), RoundPipeStrategy(num_microbatches=2), devices=2)
    model = found.module.model.eval()
    tokens = token_batches(num=1)[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        model.save_pretrained(tmp_path)
        base = seeded(lambda: PAIRS[name][0]().double())
        reloaded = peft.PeftModel.from_pretrained(base, tmp_path).double().eval()
        # peft reads adapters back in float32.
        torch.testing.assert_close(reloaded(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
        if name != "llama-prompt":
            merged = copy.deepcopy(model).merge_and_unload()
            torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-6, atol=1e-6)


def fit_again(module: L.LightningModule, strategy: Any, devices: int) -> None:
    trainer_for(strategy, devices).fit(module, BatchDealer(token_batches(num=2)))


def compare(one: nn.Module, two: nn.Module) -> None:
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-12, msg=name)


def test_several_adapters_train_in_turn() -> None:
    """Another adapter is switched to between two fits with the same trainer's strategy; the first one then rests."""

    def run(strategy: Callable[[], Any], devices: int) -> LanguageModel:
        module = adapted("llama-lora")()
        seeded(lambda: module.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"])))
        module.double()
        fit_again(module, strategy(), devices)
        module.model.set_adapter("second")
        fit_again(module, strategy(), devices)
        return module

    expected, found = run(lambda: "auto", 1), run(lambda: RoundPipeStrategy(num_microbatches=3), 2)
    compare(expected, found)
    assert any(parameter.abs().max() > 0 for key, parameter in found.named_parameters() if "lora_B.second" in key)


def test_adapter_switched_during_a_fit() -> None:
    class Switch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            module.model.set_adapter("default" if batch_idx % 2 == 0 else "second")

    def build() -> LanguageModel:
        module = adapted("llama-lora")()
        seeded(lambda: module.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"])))
        return module.double()

    expected = train(build, token_batches(num=4), callbacks=[Switch()])
    found = train(build, token_batches(num=4), RoundPipeStrategy(num_microbatches=3), devices=2, callbacks=[Switch()])
    assert_results_close(expected, found, rtol=1e-9)


@pytest.mark.parametrize("name", ["llama-lora", "moe-experts"])
def test_second_fit_goes_on(name: str) -> None:
    def run(strategy: Callable[[], Any], devices: int) -> LanguageModel:
        module = adapted(name)()
        for _ in range(2):
            fit_again(module, strategy(), devices)
        return module

    compare(run(lambda: "auto", 1), run(lambda: RoundPipeStrategy(num_microbatches=3), 2))


class PrefersOwnAnswer(LanguageModel):
    """Compares the adapted model with the one below its adapters, as preference losses do."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.model(**batch).loss
        return (self.model(**batch).loss - reference).exp()


@pytest.mark.parametrize("name", ["llama-lora", "moe-experts"])
def test_reference_below_the_adapters(name: str) -> None:
    base, config = PAIRS[name]

    def build() -> LanguageModel:
        return seeded(lambda: PrefersOwnAnswer(peft.get_peft_model(base(), config())).double())

    expected = train(build, token_batches(num=2))
    found = train(build, token_batches(num=2), RoundPipeStrategy(num_microbatches=1), devices=2)
    assert_results_close(expected, found, rtol=1e-9)


def test_adapter_of_a_head_that_is_a_parameter_is_refused_with_the_way_out() -> None:
    def build() -> LanguageModel:
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["lm_head.weight"])
        return seeded(lambda: LanguageModel(peft.get_peft_model(llama(), config)).double())

    expected = train(build, token_batches(num=2))
    with pytest.raises(
        UnsupportedUseError, match=r"Parameter `weight` of .* was replaced .* `RoundPipeStrategy\(units"
    ):
        train(build, token_batches(num=2), RoundPipeStrategy(num_microbatches=2))
    units = ["model.base_model.model.lm_head"]
    found = train(build, token_batches(num=2), RoundPipeStrategy(num_microbatches=2, units=units), devices=2)
    assert_results_close(expected, found, rtol=1e-9)


@pytest.mark.parametrize("projection", [False, True])
def test_prefix_tuning_is_refused_with_the_way_out(projection: bool) -> None:
    """It hands keys and values to every layer in a cache."""

    def build() -> LanguageModel:
        config = peft.PrefixTuningConfig(
            task_type=CAUSAL, num_virtual_tokens=4, prefix_projection=projection, encoder_hidden_size=16
        )
        return seeded(lambda: LanguageModel(peft.get_peft_model(llama(), config)))

    with pytest.raises(UnsupportedUseError, match="instead of prefix tuning, which does so, use prompt tuning or LoRA"):
        train(build, token_batches(num=1), RoundPipeStrategy(num_microbatches=2))


@pytest.mark.parametrize("name", ["llama-lora", "moe-experts"])
@pytest.mark.parametrize("flags", [{"optimizer_overlap": "exact"}, {"replica_groups": 2}], ids=str)
def test_other_ways_of_running_steps(name: str, flags: dict[str, Any]) -> None:
    """Replica groups run the same unit on two workers at a time."""
    build = adapted(name)
    expected = train(build, token_batches(num=2))
    found = train(build, token_batches(num=2), RoundPipeStrategy(num_microbatches=6, **flags), devices=4)
    assert_results_close(expected, found, rtol=1e-9)
