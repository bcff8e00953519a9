"""Speed of a training step: tokens/s, bubble ratio, memory. One JSON line for each run.

    python benchmarks/step.py --model qwen3-1.7b --system roundpipe --micro-batches 4 --memory-gib 24
    python benchmarks/step.py --model qwen3-1.7b --system in-memory

Models are built from a configuration, with a random block of numbers as weights; tokens are random. ``in-memory``
trains with everything on the GPU, bf16 weights and a fused optimizer there, and recomputes each layer: what streaming
is compared with.
"""

import argparse
import json
import resource
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from lightning_roundpipe.losses import linear_cross_entropy
from lightning_roundpipe.plan.schedule import Schedule
from lightning_roundpipe.plan.stages import Plan

GIB = 2**30

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 256, "inner": 512, "layers": 4, "heads": 4, "kv_heads": 2, "width": 64, "vocabulary": 4096},
    "qwen3-1.7b": {
        "hidden": 2048, "inner": 6144, "layers": 28, "heads": 16, "kv_heads": 8, "width": 128, "vocabulary": 151936,
    },
    "llama-8b-lora": {
        "hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "width": 128, "vocabulary": 128256,
    },
    "qwen3-32b-lora": {
        "hidden": 5120, "inner": 25600, "layers": 64, "heads": 64, "kv_heads": 8, "width": 128, "vocabulary": 151936,
    },
}  # fmt: skip


def build(name: str, device: str) -> nn.Module:
    """A causal language model with random weights: float32 where they are trained on the host, else bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = MODELS[name]
    lora = name.endswith("lora")
    llama = name.startswith("llama")
    config_class: Any = LlamaConfig if llama else Qwen3Config
    model_class: Any = LlamaForCausalLM if llama else Qwen3ForCausalLM
    config = config_class(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["width"],
        tie_word_embeddings=not lora,
        max_position_embeddings=2**20,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        half = lora or device != "cpu"
        model = model_class._from_config(config, dtype=torch.bfloat16 if half else torch.float32)
    if device != "meta":
        model.to_empty(device=device)
        with torch.device(device):
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        model.tie_weights()
        fill(model)
    if lora:
        from peft import LoraConfig, inject_adapter_in_model

        adapters = LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        model = inject_adapter_in_model(adapters, model)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in parameter_name)
            if "lora_" in parameter_name and device == "cpu":
                parameter.data = parameter.data.float()
    return model.train()


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give weights a random block, over and over: random numbers for billions of weights would take minutes."""
    block = 0.02 * torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        flat = parameter.view(-1)
        pattern = block.to(flat.device, flat.dtype)
        for start in range(0, len(flat), len(pattern)):
            flat[start : start + len(pattern)] = pattern[: len(flat) - start]


class LanguageModel(L.LightningModule):
    def __init__(self, name: str, device: str, compiled_loss: bool = False) -> None:
        super().__init__()
        self.model = build(name, device)
        self.compiled_loss = compiled_loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.model(input_ids=batch, use_cache=False).last_hidden_state
        labels = batch[:, 1:].flatten()
        inputs = hidden[:, :-1].flatten(0, 1)
        return linear_cross_entropy(inputs, self.model.lm_head.weight, labels, compiled=self.compiled_loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-5, fused=True)


class RandomTokens(Dataset[Tensor]):
    def __init__(self, vocabulary: int, samples: int, length: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class StepClock:
    """Time from the end of one batch to the end of the next, with everything that Lightning does in between."""

    def __init__(self, profiled_step: int | None = None) -> None:
        self.profiled_step = profiled_step
        self.profiler: Any = None
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.parts: list[dict[str, float]] = []

    def begin(self, step: int) -> None:
        if step == self.profiled_step:
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.__enter__()

    def profile_summary(self) -> dict[str, Any]:
        """Of the profiled step: share of the time without a kernel, and the kernels that took longest, in ms."""
        if self.profiler is None:
            return {}
        events = [e for e in self.profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if "Mem" not in e.name)
        copies = sum(e.time_range.end - e.time_range.start for e in events if "Mem" in e.name)
        busy, reach = 0.0, kernels[0][0]
        for start, stop, _ in kernels:
            busy += max(0.0, stop - max(start, reach))
            reach = max(reach, stop)
        window = reach - kernels[0][0]
        by_name: dict[str, float] = {}
        for start, stop, name in kernels:
            by_name[name[:60]] = by_name.get(name[:60], 0.0) + (stop - start) / 1000
        longest = sorted(by_name.items(), key=lambda item: -item[1])[:14]
        return {
            "kernel_ms": round(busy / 1000, 1), "kernel_window_ms": round(window / 1000, 1),
            "copies_ms": round(copies / 1000, 1), "kernels": len(kernels),
            "longest": {name: round(ms, 1) for name, ms in longest},
        }  # fmt: skip

    def end(self, loss: Any, stats: Any) -> None:
        if self.profiler is not None and len(self.ends) == self.profiled_step:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
        self.ends.append(time.perf_counter())
        self.losses.append(float(loss))
        if stats is not None:
            self.parts.append(
                {
                    "run_s": stats.stop_s - stats.start_s,
                    "busy_s": sum(stats.busy_s),
                    "window_s": stats.window_s,
                    "update_s": stats.update_s,
                    "update_exposed_s": stats.update_exposed_s,
                }
            )


class PlannedStrategy(RoundPipeStrategy):
    """Runs a plan given on the command line, and tells a clock of every step.

    Not a callback does that: an update waits for callbacks that may look at weights.
    """

    plan: str | None = None
    clock: StepClock

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.begin(len(self.clock.ends))
        loss = super().training_step(*args, **kwargs)
        self.clock.end(loss, self.step_stats)
        return loss

    def _make_executor(self, module: L.LightningModule) -> Any:
        executor = super()._make_executor(module)
        if self.plan:
            forward, _, rest = self.plan.partition("|")
            fused, *backward = map(int, rest.split("-"))
            plan = Plan(tuple(int(size) for size in forward.split("-") if size), fused, tuple(backward))
            executor.plan_training = lambda calls, count: Schedule(plan, len(executor.workers), count)
        return executor


def run_roundpipe(args: argparse.Namespace) -> dict[str, Any]:
    strategy = PlannedStrategy(
        num_microbatches=args.micro_batches,
        workers_per_device=args.workers_per_device,
        optimizer_overlap=args.overlap,
        compile_units=args.compile,
    )
    strategy.plan = args.plan
    clock = strategy.clock = StepClock(profiled_step=args.warmup if args.profile else None)
    lora = args.model.endswith("lora")
    plugins = [] if lora else [RoundPipePrecision("bf16-mixed", half_weights=True)]
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1, strategy=strategy, plugins=plugins, precision="bf16-mixed" if lora else None,
        max_steps=args.steps + args.warmup, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=args.clip,
    )  # fmt: skip
    trainer.fit(LanguageModel(args.model, "cpu", args.compile), loader(args))
    parts = clock.parts[args.warmup :]
    medians = {name: round(statistics.median(part[name] for part in parts), 4) for name in parts[0]}
    plan = {"overlap": args.overlap, "plan": str(strategy.step_stats.schedule.plan)}
    return summary(args, clock) | medians | plan | clock.profile_summary()


def run_in_memory(args: argparse.Namespace) -> dict[str, Any]:
    module = LanguageModel(args.model, "cuda")
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = module.configure_optimizers()
    clock = StepClock()
    batches = iter(loader(args))
    for _ in range(args.steps + args.warmup):
        batch = next(batches).cuda()
        total = torch.zeros((), device="cuda")
        for micro_batch in batch.chunk(args.micro_batches):
            loss = module.training_step(micro_batch, 0) / args.micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        clock.end(total, None)
    return summary(args, clock)


def loader(args: argparse.Namespace) -> DataLoader[Tensor]:
    tokens = RandomTokens(MODELS[args.model]["vocabulary"], args.batch * (args.steps + args.warmup), args.sequence)
    return DataLoader(tokens, batch_size=args.batch)


def summary(args: argparse.Namespace, clock: StepClock) -> dict[str, Any]:
    times = [stop - start for start, stop in zip(clock.ends, clock.ends[1:], strict=False)][args.warmup - 1 :]
    step_s = statistics.median(times)
    return {
        **{
            name: getattr(args, name)
            for name in ("system", "model", "micro_batches", "batch", "sequence", "memory_gib")
        },
        "tokens_per_s": round(args.batch * args.sequence / step_s),
        "step_s": round(step_s, 4),
        "steps_s": [round(step, 3) for step in times],
        "losses": [round(loss, 4) for loss in clock.losses],
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if torch.cuda.is_available() else 0.0,
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-1.7b")
    parser.add_argument("--system", choices=["roundpipe", "in-memory"], default="roundpipe")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--memory-gib", type=float, default=0.0, help="cap of the allocator; 0 for none")
    parser.add_argument("--workers-per-device", type=int, default=1)
    parser.add_argument("--overlap", choices=["off", "exact"], default="exact")
    parser.add_argument("--clip", type=float, help="clip gradients to this norm")
    parser.add_argument("--compile", action="store_true", help="compile units and the loss")
    parser.add_argument("--profile", action="store_true", help="profile the first step after the warm-up")
    parser.add_argument("--plan", help="calls in forward stages | fused stage and backward stages, e.g. 10-10|10-8-8-4")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_possible_user_warnings()
    torch.manual_seed(0)
    if args.memory_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_gib * GIB / total)
    run = run_roundpipe if args.system == "roundpipe" else run_in_memory
    print(json.dumps(run(args)), flush=True)


if __name__ == "__main__":
    main()
