"""Trains a small transformers causal language model, byte by byte, on the sources of Python's standard library.

The model comes from a config, so nothing is downloaded. The LightningModule and the LightningDataModule are ordinary:
`--strategy auto` runs the very same script in plain Lightning on one device, for comparison.

    python examples/finetune_causal_lm.py
    python examples/finetune_causal_lm.py --strategy auto
    python examples/finetune_causal_lm.py --accelerator gpu --devices 2 --micro-batches 8
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks import BubbleRatioMonitor

END_OF_FILE = 256  # the one token that is not a byte
VOCABULARY_SIZE = 257


class StandardLibrary(L.LightningDataModule):
    """The modules of Python's standard library as rows of bytes; every tenth file is kept for validation.

    Args:
        batch_size: Rows in a batch.
        sequence_length: Bytes in a row.
    """

    def __init__(self, batch_size: int = 16, sequence_length: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.sequence_length = sequence_length

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.validation = self._rows(files[::10])
        self.training = self._rows([file for number, file in enumerate(files) if number % 10])

    def _rows(self, files: Sequence[Path]) -> TensorDataset:
        tokens: list[int] = []
        for file in files:
            tokens += [*file.read_bytes(), END_OF_FILE]
        num_rows = len(tokens) // self.sequence_length
        rows = torch.tensor(tokens[: num_rows * self.sequence_length]).view(num_rows, self.sequence_length)
        # Shuffled once, so that a limited validation sees every file.
        return TensorDataset(rows[torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)


class CausalLM(L.LightningModule):
    """A Qwen3 of about a million parameters, with tied embeddings, that reads and writes bytes.

    Args:
        hidden_size: Width of the decoder layers.
        num_layers: Number of decoder layers.
        learning_rate: Peak of the one-cycle schedule.
    """

    def __init__(self, hidden_size: int = 128, num_layers: int = 6, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=hidden_size,
                intermediate_size=3 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=hidden_size // 4,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                use_cache=False,  # a cache of keys and values is for writing; training has no use for it
                bos_token_id=None,
                eos_token_id=END_OF_FILE,
                pad_token_id=END_OF_FILE,
            )
        )

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        (rows,) = batch
        return self.model(input_ids=rows, labels=rows).loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def complete(self, text: str, num_bytes: int) -> str:
        """Returns ``text`` with ``num_bytes`` sampled bytes behind it, or fewer where the model ends the file."""
        prompt = torch.tensor([list(text.encode())], device=self.device)
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_bytes,
            do_sample=True,
            temperature=0.7,
            use_cache=True,
        )
        return bytes(token for token in tokens[0].tolist() if token != END_OF_FILE).decode(errors="replace")


class LossHistory(L.Callback):
    """Keeps the training loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, or ``arguments`` in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["roundpipe", "auto"], default="roundpipe", help="auto: plain Lightning")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="workers; plain Lightning always uses one device")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="at most one epoch")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sample-bytes", type=int, default=300, help="length of the generated continuation")
    parser.add_argument("--output", type=Path, default=Path("checkpoints/causal_lm"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, saves, loads and samples.

    Args:
        arguments: The command line; None for the process's own.

    Returns:
        The training loss of every step.
    """
    args = parse_arguments(arguments)
    L.seed_everything(args.seed)

    history = LossHistory()
    callbacks: list[L.Callback] = [history]
    strategy: RoundPipeStrategy | str = "auto"
    if args.strategy == "roundpipe":
        if args.accelerator == "cpu":  # virtual workers share the cores instead of fighting for them
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))
        strategy = RoundPipeStrategy(num_microbatches=args.micro_batches)
        callbacks.append(BubbleRatioMonitor())

    trainer = L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices if args.strategy == "roundpipe" else 1,
        max_epochs=1,
        limit_train_batches=args.steps,
        val_check_interval=max(1, args.steps // 2),
        limit_val_batches=8,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=CSVLogger(args.output),
        enable_checkpointing=False,
    )
    started = time.perf_counter()
    trainer.fit(CausalLM(args.hidden_size, args.layers), StandardLibrary(args.batch_size, args.sequence_length))
    print(f"\n{len(history.losses)} steps in {time.perf_counter() - started:.0f} s")
    print(f"training loss: {history.losses[0]:.3f} at the first step, {history.losses[-1]:.3f} at the last")
    print(f"validation loss: {trainer.callback_metrics['val_loss']:.3f}")
    if "roundpipe/bubble_ratio" in trainer.callback_metrics:
        print(f"bubble ratio: {trainer.callback_metrics['roundpipe/bubble_ratio']:.1%} of the workers' time was idle")

    # An ordinary checkpoint: loading it needs no strategy, and would not need this package.
    checkpoint = args.output / "model.ckpt"
    trainer.save_checkpoint(checkpoint)
    model = CausalLM.load_from_checkpoint(checkpoint, weights_only=True).eval()
    print(f"\nsaved and reloaded {checkpoint}; it writes:\n")
    print(model.complete("def __init__(self, ", args.sample_bytes))
    return history.losses


if __name__ == "__main__":
    main()
