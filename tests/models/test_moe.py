"""Mixtures of experts: packed and listed experts, experts without tokens, recomputed routing, auxiliary losses."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.runtime.executor import largest_unit_bytes
from lightning_roundpipe.runtime.testing import executor_of
from lightning_roundpipe.runtime.worker import Worker
from tests.helpers.equivalence import TrainResult, assert_results_close, in_microbatches, train
from tests.helpers.models import LanguageModel, StepModule, seeded, token_batches

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8},
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 2, "topk_group": 1}),
    "olmoe": ("Olmoe", {"num_experts": 8, "eos_token_id": 1}),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 8}),
    "glm4_moe": (
        "Glm4Moe",
        {"moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 1, "first_k_dense_replace": 1},
    ),
    "llama4": (
        "Llama4",
        {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
    ),
}  # fmt: skip
# Have `output_router_logits`, which adds the loss that balances the load of the experts.
BALANCED = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granite_moe")


def model(family: str, experts: str = "grouped_mm", **more: Any) -> LanguageModel:
    name, sizes = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(**{**SIZES, "num_experts_per_tok": 2, **sizes, **more})
    config._experts_implementation = experts
    return LanguageModel(getattr(transformers, f"{name}ForCausalLM")(config))


def compare(
    build: Callable[[], Any], rtol: float, num_microbatches: int, devices: int, batches: list[Any] | None = None
) -> TrainResult:
    batches = batches or token_batches(num=3)
    expected = train(lambda: seeded(build), batches)
    found = train(lambda: seeded(build), batches, RoundPipeStrategy(num_microbatches=num_microbatches), devices)
    assert_results_close(expected, found, rtol)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    """In float64; routers that compute in float32 all the same leave their rounding."""
    compare(lambda: model(family, "eager").double(), 1e-6, num_microbatches=3, devices=2)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_grouped_kernel(family: str) -> None:
    compare(lambda: model(family), 5e-5, num_microbatches=3, devices=3)


@pytest.mark.parametrize("family", BALANCED)
def test_balancing_loss_over_the_batch(family: str) -> None:
    """Counted once, and through recomputation: the router logits leave the units by hooks."""

    def build() -> Any:
        return model(family, "eager", output_router_logits=True, router_aux_loss_coef=0.5).double()

    compare(build, 1e-8, num_microbatches=1, devices=2)
    without = train(lambda: seeded(lambda: model(family, "eager").double()), token_batches(num=1))
    with_loss = train(lambda: seeded(build), token_batches(num=1), RoundPipeStrategy(num_microbatches=1))
    assert float(with_loss.losses[0] or 0) > float(without.losses[0] or 0) + 0.1


def test_balancing_loss_of_micro_batches() -> None:
    """With several micro-batches it is the mean of theirs, as with gradient accumulation."""

    def build() -> Any:
        return model("qwen3_moe", "eager", output_router_logits=True, router_aux_loss_coef=0.5).double()

    expected = train(in_microbatches(lambda: seeded(build), 3), token_batches(num=2))
    found = train(lambda: seeded(build), token_batches(num=2), RoundPipeStrategy(num_microbatches=3), devices=2)
    assert_results_close(expected, found, rtol=1e-8)


class Expert(nn.Linear):
    """A class of its own, by which experts can be named."""


class Experts(nn.Module):
    """A list of experts; each is called with its tokens, or not at all."""

    def __init__(self, width: int, num_experts: int, expert: type[nn.Linear]) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(expert(width, width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, positions = torch.where(chosen == index)
            if len(rows):
                out[rows, positions] += expert(x[rows, positions]) * weights[rows, positions, None]
        return x + out


class ListedExperts(StepModule):
    """More experts than a micro-batch has tokens; one that the router never takes."""

    num_experts = 12

    def __init__(self, expert: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Experts(16, self.num_experts, expert) for _ in range(3))
        self.head = nn.Linear(16, 64)
        with torch.no_grad():
            for block in self.blocks:
                block.router.bias[-1] = -1e4

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("units", ["auto", ["Linear", "Embedding"]], ids=str)
def test_listed_experts_without_tokens(units: Any) -> None:
    """The experts are found as parts of their block, or each is a unit: which are called differs by micro-batch."""
    batches = token_batches(num=3, positions=3)
    build = lambda: seeded(lambda: ListedExperts().double())  # noqa: E731
    expected = train(build, batches)
    found = train(build, batches, RoundPipeStrategy(num_microbatches=6, units=units), devices=3)
    assert_results_close(expected, found, rtol=1e-10)
    for block in found.module.blocks:
        assert all(parameter.grad is None for parameter in block.experts[-1].parameters())


def test_packed_experts_without_tokens() -> None:
    """Four tokens cannot reach eight experts: their slices get no gradient but take part in weight decay, as ever."""
    batches = token_batches(num=3, rows=2, positions=2)
    compare(lambda: model("qwen3_moe", "eager", num_experts_per_tok=1).double(), 1e-9, 2, 2, batches)


@pytest.mark.parametrize(
    "units",
    [["Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"], ["Qwen3MoeAttention", "Qwen3MoeTopKRouter", "Qwen3MoeExperts"]],
    ids=["two", "three"],
)
def test_several_units_in_a_layer(units: list[str]) -> None:
    """A layer that is too large for a slot is streamed in parts; what no part owns (norms) goes on its own."""
    build = lambda: seeded(lambda: model("qwen3_moe", "eager").double())  # noqa: E731
    expected = train(build, token_batches(num=2))
    found = train(build, token_batches(num=2), RoundPipeStrategy(num_microbatches=3, units=units), devices=2)
    assert_results_close(expected, found, rtol=1e-9)


@pytest.mark.parametrize(("name", "max_bytes"), [("packed", 110_000), ("listed", 10_000)])
def test_layers_that_exceed_a_slot_are_cut(name: str, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose memory for weights does not hold a layer twice."""
    build: Callable[[], Any] = {"packed": lambda: model("qwen3_moe", "eager").double(), "listed": ListedExperts}[name]
    monkeypatch.setattr("lightning_roundpipe.strategy.largest_unit_bytes", lambda devices, limit, dtype: max_bytes)
    found: list[str] = []

    class Note(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            found.extend(unit.name for unit in executor_of(trainer.strategy).units)

    batches = token_batches(num=2)
    expected = train(lambda: seeded(build), batches)
    result = train(lambda: seeded(build), batches, RoundPipeStrategy(num_microbatches=3), devices=2, callbacks=[Note()])
    assert_results_close(expected, result, rtol=1e-5 if name == "listed" else 1e-9)
    if name == "packed":
        assert "model.model.layers.0.self_attn" in found and "model.model.layers.0.mlp" in found
    else:
        assert sum(".experts." in unit for unit in found) == 3 * ListedExperts.num_experts


def test_experts_without_tokens_are_not_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens call few experts, others in every batch. Those that were called before cost no transfer for that."""
    uploads: list[Tensor] = []
    upload = Worker.upload_weight

    def watched(worker: Worker, parameter: Tensor) -> Tensor:
        uploads.append(parameter)
        return upload(worker, parameter)

    monkeypatch.setattr(Worker, "upload_weight", watched)
    build = lambda: seeded(lambda: ListedExperts(Expert).double())  # noqa: E731
    batches = token_batches(num=4, rows=2, positions=2)
    expected = train(build, batches)
    counts = []
    for upload_on_call in (None, ["Expert"]):
        uploads.clear()
        strategy = RoundPipeStrategy(num_microbatches=2, units=["Expert"], upload_on_call=upload_on_call)
        found = train(build, batches, strategy, devices=2)
        assert_results_close(expected, found, rtol=1e-10)
        experts = {id(p) for block in found.module.blocks for expert in block.experts for p in expert.parameters()}
        counts.append(sum(id(parameter) in experts for parameter in uploads))
    planned, called = counts
    assert called < planned


def test_units_to_upload_on_call_must_exist() -> None:
    strategy = RoundPipeStrategy(num_microbatches=2, upload_on_call=["Expert"])
    with pytest.raises(ValueError, match="no unit is a Expert; there are Embedding, Experts, Linear"):
        train(lambda: seeded(ListedExperts), token_batches(num=1), strategy)


def test_a_layer_must_fit_twice() -> None:
    """Workers that share a GPU share its memory; what is converted for its upload may be larger by that."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with (
        mock.patch("torch.cuda.mem_get_info", return_value=(1000, 2000)),
        mock.patch("torch.cuda.memory_reserved", return_value=200),
        mock.patch("torch.cuda.get_per_process_memory_fraction", create=True, return_value=1.0) as fraction,
    ):
        alone = largest_unit_bytes([gpu], 0.9, None)
        assert 0 < alone < 450
        assert largest_unit_bytes([gpu, gpu], 0.9, None) == pytest.approx(alone / 2, abs=1)
        assert largest_unit_bytes([gpu], 0.9, torch.bfloat16) == 2 * alone
        fraction.return_value = 0.5  # of 2000, of which 200 are in use
        assert largest_unit_bytes([gpu], 0.9, None) == pytest.approx(0.8 * alone, abs=2)
    assert largest_unit_bytes([cpu, cpu], 0.9, None) == float("inf")
