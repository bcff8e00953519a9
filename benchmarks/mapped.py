"""LoRA of a mixture of experts whose weights stay in files: tokens/s, and the rate at which the files are read.

    python benchmarks/mapped.py --folder /scratch/experts --layers 12 --host-weights mmap --cold
    python benchmarks/mapped.py --folder /scratch/experts --layers 12 --host-weights auto --free-gib 12
    python benchmarks/mapped.py --folder /scratch/experts --layers 12 --host-weights pinned

Layers have the shape of Qwen3-30B-A3B's (1.2 GB each, 48 in the original). The files are written first, with a random
block over and over, if the folder has none; the model is never in memory as a whole. One JSON line with one entry for
each step; the first step looks for the order of calls, and reads everything once more.
"""

import argparse
import ctypes
import json
import mmap
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy, strategy
from lightning_roundpipe.loading import empty_parameters, load_pretrained
from lightning_roundpipe.losses import linear_cross_entropy
from lightning_roundpipe.plan.timeline import Lane, TransferSpan
from lightning_roundpipe.runtime.hardware import host_facts
from lightning_roundpipe.runtime.weight_files import TensorSpec, write_weights
from step import GIB, RandomTokens

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
}  # fmt: skip
_PAGE_OUT = 21
"""MADV_PAGEOUT, which Python does not know."""


def build(shape: str, layers: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SHAPES[shape], num_hidden_layers=layers, intermediate_size=64, use_cache=False, tie_word_embeddings=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with empty_parameters():
        model: nn.Module = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model


def write(model: nn.Module, folder: Path) -> None:
    """Files with the weights of ``model`` as it has them; random as far as the speed of reading goes."""
    specs = {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in model.state_dict().items()}
    largest = max(spec.shape.numel() for spec in specs.values())
    block = (0.02 * torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0))).bfloat16()
    values = block.repeat(-(-largest // len(block)))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, spec in specs.items():
            norm = len(spec.shape) < 2
            yield name, torch.ones(spec.shape) if norm else values[: spec.shape.numel()].view(spec.shape)

    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, specs, tensors(), 4 * GIB)


class Adapted(L.LightningModule):
    def __init__(self, shape: str, layers: int, folder: Path) -> None:
        super().__init__()
        from peft import LoraConfig, inject_adapter_in_model

        model = build(shape, layers)
        load_pretrained(model, folder, progress=False)
        adapters = LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.model: Any = inject_adapter_in_model(adapters, model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.float()
        self.model.train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1]
        return linear_cross_entropy(hidden.flatten(0, 1), self.model.lm_head.weight, batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


class Watch(L.Callback):
    """Times steps and sums up their uploads; lets go of the files' pages between them if they are to be cold."""

    def __init__(self, cold: bool) -> None:
        self.cold = cold
        self.start_s = 0.0
        self.steps: list[dict[str, float]] = []
        self.place: dict[str, float] = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if self.cold:
            page_out([parameter for parameter in module.parameters() if not parameter.requires_grad])
        self.start_s = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        step_s = time.perf_counter() - self.start_s
        ours: Any = trainer.strategy
        uploads = [span for span in ours.step_stats.transfers if span.lane is Lane.H2D]
        num_bytes = sum(span.num_bytes for span in uploads)
        self.steps.append(
            {
                "step_s": round(step_s, 3),
                "uploaded_bytes": num_bytes,
                "gb_per_s": round(num_bytes / 1e9 / step_s, 2),
                "gb_per_s_while_uploading": round(num_bytes / 1e9 / max(1e-9, busy_s(uploads)), 2),
            }
        )
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
        self.place = {
            "pinned_gib": round(ours.pinned_bytes / GIB, 2),
            "mapped_gib": round(ours.mapped_bytes / GIB, 2),
            "own_memory_gib": round(own / GIB, 2),
        }


def busy_s(spans: Sequence[TransferSpan]) -> float:
    """Seconds in which any of ``spans`` was under way."""
    total, reach = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(span.start, reach))
        reach = max(reach, span.stop)
    return total


def page_out(tensors: Sequence[Tensor]) -> None:
    """Drop pages of files from memory, so that the next read goes to the disk."""
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_PAGE_OUT))


def run(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(args.folder)
    start = time.perf_counter()
    if not list(folder.glob("*.safetensors")):
        write(build(args.shape, args.layers), folder)
        os.sync()
    written_s = time.perf_counter() - start
    if args.free_gib:
        pretended = replace(host_facts(), available_bytes=int(args.free_gib * GIB), swap_bytes=0)
        strategy.host_facts = lambda: pretended  # type: ignore[assignment]
    module = Adapted(args.shape, args.layers, folder)
    watch = Watch(args.cold)
    tokens = RandomTokens(SHAPES[args.shape]["vocab_size"], args.batch * args.steps, args.sequence)
    gpu = torch.cuda.is_available()
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(
            args.micro_batches, host_weights=args.host_weights, gpu_memory_limit=args.gpu_memory_limit
        ),
        devices=1,
        accelerator="gpu" if gpu else "cpu", precision="bf16-mixed", callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_steps=args.steps,
    )  # fmt: skip
    trainer.fit(module, DataLoader(tokens, batch_size=args.batch))
    last = watch.steps[-1]["step_s"]
    given = (
        "shape",
        "layers",
        "host_weights",
        "cold",
        "free_gib",
        "gpu_memory_limit",
        "batch",
        "sequence",
        "micro_batches",
    )
    return {
        **{name: getattr(args, name) for name in given},
        "written_s": round(written_s, 1),
        "tokens_per_s": round(args.batch * args.sequence / last),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if gpu else 0.0,
        **watch.place,
        "steps": watch.steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where the weights are, or are to be written")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--host-weights", choices=["auto", "pinned", "pageable", "mmap"], default="mmap")
    parser.add_argument("--cold", action="store_true", help="drop what was read between steps")
    parser.add_argument("--free-gib", type=float, default=0.0, help="pretend that so much host memory is free")
    parser.add_argument(
        "--gpu-memory-limit", type=float, default=0.15, help="share of the GPU; what fits there is read only once"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    disable_possible_user_warnings()
    torch.manual_seed(0)
    print(json.dumps(run(args)), flush=True)


if __name__ == "__main__":
    main()
