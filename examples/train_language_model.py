"""Four recipes for language models, with a Trainer: full fine-tuning, LoRA, LoRA of a mixture of experts, long rows.

By default each trains a model of a few hundred thousand parameters on the CPU, without a download. For the real thing
name a model and take GPUs:

    python examples/train_language_model.py full-qwen3
    python examples/train_language_model.py lora-llama --strategy auto     # plain Lightning, for comparison
    python examples/train_language_model.py lora-qwen3-moe --pretrained Qwen/Qwen3-30B-A3B --accelerator gpu --devices 2
    python examples/train_language_model.py long-context --pretrained Qwen/Qwen3-1.7B --sequence-length 65536 \
        --accelerator gpu --devices 1
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from language_model import NUM_BYTES, LanguageModel, Text
from lightning_roundpipe import RoundPipeStrategy

SMALL: dict[str, Any] = {
    "vocab_size": NUM_BYTES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def full_qwen3(**model: Any) -> tuple[LanguageModel, RoundPipeStrategy]:
    """Every weight trains. Updates run along with the backward pass."""
    module = LanguageModel("qwen3", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}, **model)
    return module, RoundPipeStrategy(num_microbatches=4)


def lora_llama(**model: Any) -> tuple[LanguageModel, RoundPipeStrategy]:
    """Low-rank adapters of all linear layers; what is frozen is streamed and costs nothing else."""
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    return LanguageModel("llama", SMALL, lora=lora, **model), RoundPipeStrategy(num_microbatches=4)


def lora_qwen3_moe(**model: Any) -> tuple[LanguageModel, RoundPipeStrategy]:
    """Adapters of the attention and of the experts, which are one packed parameter for each layer and projection."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    lora = {
        "r": 4,
        "target_modules": ATTENTION,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    module = LanguageModel("qwen3_moe", {**SMALL, **experts, "head_dim": 16}, lora=lora, **model)
    return module, RoundPipeStrategy(num_microbatches=4)


def long_context(**model: Any) -> tuple[LanguageModel, RoundPipeStrategy]:
    """Rows whose logits would fill a GPU: head, loss and MLPs work by parts, and each row is a micro-batch."""
    module = LanguageModel("qwen3", {**SMALL, "head_dim": 16, "max_position_embeddings": 2**17}, **model)
    return module, RoundPipeStrategy(num_microbatches=2, chunked_loss=True, sequence_tiles={"Qwen3MLP": 1024})


RECIPES: dict[str, tuple[Callable[..., tuple[LanguageModel, RoundPipeStrategy]], dict[str, int]]] = {
    "full-qwen3": (full_qwen3, {"sequence_length": 128, "batch_size": 8}),
    "lora-llama": (lora_llama, {"sequence_length": 128, "batch_size": 8}),
    "lora-qwen3-moe": (lora_qwen3_moe, {"sequence_length": 128, "batch_size": 8}),
    "long-context": (long_context, {"sequence_length": 2048, "batch_size": 2}),
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, or ``arguments`` in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--strategy", choices=["roundpipe", "auto"], default="roundpipe", help="auto: plain Lightning")
    parser.add_argument("--pretrained", help="a folder or a name to load model and tokenizer from")
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="workers; plain Lightning always uses one device")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--output", type=Path, help="folder for the trained model, or its adapters")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains by a recipe.

    Args:
        arguments: The command line; None for the process's own.

    Returns:
        The training loss of every step.
    """
    args = parse_arguments(arguments)
    L.seed_everything(0)
    recipe, sizes = RECIPES[args.recipe]
    module, strategy = recipe(pretrained=args.pretrained, learning_rate=args.learning_rate)
    data = Text(
        tokenizer=args.pretrained,
        sequence_length=args.sequence_length or sizes["sequence_length"],
        batch_size=args.batch_size or sizes["batch_size"],
    )
    losses: list[float] = []

    class History(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trainer = L.Trainer(
        strategy=strategy if args.strategy == "roundpipe" else "auto",
        accelerator=args.accelerator,
        devices=args.devices if args.strategy == "roundpipe" else 1,
        precision=args.precision,
        max_steps=args.steps,
        callbacks=[History()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    if args.output is not None:
        module.model.save_pretrained(args.output)
        print(f"saved {args.output}")
    return losses


if __name__ == "__main__":
    main()
