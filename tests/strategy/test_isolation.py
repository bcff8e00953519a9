"""What one micro-batch does to modes, context and attributes, no other and no recomputation sees."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import assert_results_close, train
from tests.helpers.models import Residual, StepModule, residual_batches, seeded, token_batches


def assert_as_plain(build: Any, batches: Any, num_microbatches: int = 3) -> tuple[Any, Any]:
    expected = train(lambda: seeded(build), batches)
    found = train(lambda: seeded(build), batches, RoundPipeStrategy(num_microbatches=num_microbatches), 3)
    assert_results_close(expected, found, rtol=1e-5)
    return expected.module, found.module


def test_attributes_of_self_belong_to_the_micro_batch() -> None:
    class Stores(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            self.seen: list[int] = []

        def loss(self, batch: Any) -> Tensor:
            self.targets = batch[1]
            self.steps += 1
            logits = self(batch[0])
            assert self.targets is batch[1]
            return F.cross_entropy(logits.flatten(0, -2), self.targets.flatten())

    plain, ours = assert_as_plain(Stores, residual_batches())
    assert ours.steps == plain.steps
    assert "training_step" not in vars(ours)


def test_recomputation_runs_in_the_mode_of_the_call() -> None:
    class Switches(Residual):
        def loss(self, batch: Any) -> Tensor:
            self.blocks[0].eval()
            loss = super().loss(batch)
            self.blocks[0].train()
            return loss

    def build() -> L.LightningModule:
        module = Switches()
        for inner in module.blocks[0].modules():
            if isinstance(inner, nn.Dropout):
                inner.p = 0.9
        return module

    assert_as_plain(build, residual_batches(), num_microbatches=1)


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
def test_captured_outputs_carry_gradients(output: str) -> None:
    transformers = pytest.importorskip("transformers")

    class Captures(StepModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.Qwen3Config(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, use_cache=False, attn_implementation="eager",
            )  # fmt: skip
            self.model = transformers.Qwen3ForCausalLM(config)

        def loss(self, batch: Any) -> Tensor:
            result = self.model(**batch, **{output: True})
            captured = result.hidden_states if output == "output_hidden_states" else result.attentions
            assert len(captured) >= 3
            return result.loss + 0.1 * sum(tensor.square().mean() for tensor in captured)

    assert_as_plain(Captures, token_batches())


def test_router_auxiliary_loss_has_its_gradient() -> None:
    """One micro-batch, because the loss balances experts over what it sees."""
    transformers = pytest.importorskip("transformers")

    class Routes(StepModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.Qwen3MoeConfig(
                vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
                use_cache=False, router_aux_loss_coef=0.5, output_router_logits=True,
            )  # fmt: skip
            self.model = transformers.Qwen3MoeForCausalLM(config)

        def loss(self, batch: Any) -> Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

    assert_as_plain(Routes, token_batches(), num_microbatches=1)


def test_no_randomness_is_left_behind() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=3), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # `pytest.warns` hands Lightning's own on without their module.
def test_forward_hooks_inside_units_are_warned_about() -> None:
    def build() -> L.LightningModule:
        module = Residual()
        module.blocks[1].up.register_forward_hook(lambda *_: None)
        return module

    with pytest.warns(UserWarning, match=r"hooks are registered inside unit `blocks\.1`"):
        train(lambda: seeded(build), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
