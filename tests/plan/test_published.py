"""Predictions against published throughput and memory, with one set of constants for the RTX 4090."""

from functools import cache

import pytest
import torch
import torch._dynamo  # noqa: F401 - sets an environment variable, for which counting would else be blamed

from lightning_roundpipe.plan.costs import PRECISIONS
from lightning_roundpipe.plan.devices import PROFILES
from lightning_roundpipe.plan.predict import Setup, longest_sequence, predict
from lightning_roundpipe.plan.simulator import Boundary
from lightning_roundpipe.runtime.counting import count_calls
from tests.plan.figures import rows

transformers = pytest.importorskip("transformers")

SEQUENCE = 2048
BATCH = 64  # 16 micro-batches of 4 sequences, which is what the published times and tokens per second imply
MODELS = ["qwen3-1.7b", "llama3.1-8b", "qwen3-32b"]


def configuration(model):
    if model == "llama3.1-8b":
        return transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    width, inner, layers, heads = {"qwen3-1.7b": (2048, 6144, 28, 16), "qwen3-32b": (5120, 25600, 64, 64)}[model]
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=model == "qwen3-1.7b",
    )


@cache
def counts_of(model):
    return count_calls(
        lambda: transformers.AutoModelForCausalLM.from_config(configuration(model), dtype=torch.bfloat16),
        lambda: {"input_ids": torch.zeros(1, SEQUENCE, dtype=torch.long), "use_cache": False},
        causal=True,
    )


def setup_of(model, gpus=8):
    return Setup(
        counts=counts_of(model),
        sequence=SEQUENCE,
        profile=PROFILES["rtx-4090"],
        num_workers=gpus,
        precision=PRECISIONS["bf16-mixed"],
        host_bytes_per_s=200e9,
        host_memory_bytes=1024e9,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", rows("scaling_4090"), ids=lambda row: f"{row['gpus']}-gpus")
def test_throughput_of_the_published_system(model, row):
    # As published: updates one step late, recomputation everywhere but in the head.
    prediction = predict(setup_of(model, int(row["gpus"])), BATCH, boundary=Boundary.STALE, microbatch=4, max_fused=1)
    assert prediction.tokens_per_s == pytest.approx(float(row[model]), rel=0.15)
    assert prediction.limit == "compute"


@pytest.mark.parametrize("model", MODELS)
def test_longest_sequence(model):
    (row,) = (row for row in rows("max_sequence_4090") if row["system"] == "roundpipe")
    assert longest_sequence(setup_of(model)) == pytest.approx(1000 * float(row[model]), rel=0.25)


def test_what_we_find_is_no_slower_than_what_was_published():
    published = float(rows("scaling_4090")[-1]["qwen3-1.7b"])
    assert predict(setup_of("qwen3-1.7b"), BATCH).tokens_per_s > 0.95 * published
