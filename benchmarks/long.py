"""The longest sequence that trains. One JSON line for each length that is tried, and one with the answer.

    python benchmarks/long.py --model qwen3-1.7b --memory-gib 24 --start 65536

One sequence is a batch. Lengths are doubled until memory runs out, then bisected.
"""

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipePrecision, RoundPipeStrategy
from step import GIB, MODELS, LanguageModel, RandomTokens

TILED = {"Qwen3MLP": 8192, "LlamaMLP": 8192}


def longest(fits: Callable[[int], bool], start: int, limit: int, precision: int) -> int:
    """The longest length that fits, found by doubling, then bisection.

    Args:
        fits: whether a length does.
        start: the first length to try.
        limit: where to stop.
        precision: how near to the first length that does not fit, in tokens.

    Returns:
        0 if ``start`` does not fit.
    """
    good, bad = 0, 0
    length = start
    while not bad and length <= limit:
        if fits(length):
            good = length
            length *= 2
        else:
            bad = length
    while good and bad - good > precision:
        middle = (good + bad) // 2 // precision * precision
        if middle <= good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class Trial:
    """Trains a model for two steps at one length."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.module = LanguageModel(args.model, "cpu", args.compile)

    def __call__(self, length: int) -> bool:
        lora = self.args.model.endswith("lora")
        names = {type(module).__name__ for module in self.module.modules()}
        strategy = RoundPipeStrategy(
            num_microbatches=1,
            compile_units=self.args.compile,
            recompute="all",
            sequence_tiles={name: tile for name, tile in TILED.items() if name in names} if self.args.tiles else None,
        )
        tokens = RandomTokens(MODELS[self.args.model]["vocabulary"], 2, length)
        trainer = L.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1, strategy=strategy, precision="bf16-mixed" if lora else None,
            plugins=[] if lora else [RoundPipePrecision("bf16-mixed", half_weights=True)],
            max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        report: dict[str, Any] = {"model": self.args.model, "memory_gib": self.args.memory_gib, "sequence": length}
        start = time.perf_counter()
        try:
            trainer.fit(self.module, DataLoader(tokens))
            report["fits"] = True
        except torch.OutOfMemoryError:
            report["fits"] = False
        stats = strategy.step_stats
        if report["fits"] and stats is not None:
            report["tokens_per_s"] = round(length / (stats.stop_s - stats.start_s))
        if torch.cuda.is_available():
            report["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        report["trial_s"] = round(time.perf_counter() - start, 1)
        print(json.dumps(report), flush=True)
        del trainer, strategy, stats
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return bool(report["fits"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-1.7b")
    parser.add_argument("--start", type=int, default=65536)
    parser.add_argument("--limit", type=int, default=2**20, help="longest length to try")
    parser.add_argument("--precision", type=int, default=8192, help="of the answer, in tokens")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="cap of the allocator; 0 for none")
    parser.add_argument("--compile", action="store_true", help="compile units and the loss")
    parser.add_argument("--tiles", action="store_true", help="work on the MLPs in tiles of the sequence")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_possible_user_warnings()
    torch.manual_seed(0)
    if args.memory_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory_gib * GIB / total)
    answer = longest(Trial(args), args.start, args.limit, args.precision)
    print(json.dumps({"model": args.model, "memory_gib": args.memory_gib, "longest": answer}), flush=True)


if __name__ == "__main__":
    main()
