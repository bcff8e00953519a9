"""Trains a small transformers vision transformer on the digits that come with scikit-learn.

Like the other examples, it runs in plain Lightning as well, on virtual workers and on GPUs:

    python examples/vit_digits.py
    python examples/vit_digits.py --strategy auto
    python examples/vit_digits.py --accelerator gpu --devices 1 --micro-batches 8
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.callbacks import BubbleRatioMonitor

NUM_CLASSES = 10


class Digits(L.LightningDataModule):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 grey pixels each.

    70 % are for training, 15 % for validation and 15 % for the test.

    Args:
        batch_size: Images in a batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, classes = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).div(8).sub(1).view(-1, 1, 8, 8)  # 0..16 becomes -1..1
        self.training, self.validation, self.testing = random_split(
            TensorDataset(images, torch.tensor(classes)), [0.7, 0.15, 0.15], torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.testing, self.batch_size)


class DigitClassifier(L.LightningModule):
    """A vision transformer on patches of 2 x 2 pixels.

    Args:
        hidden_size: Width of the encoder layers.
        num_layers: Number of encoder layers.
        learning_rate: Step size of AdamW.
    """

    def __init__(self, hidden_size: int = 64, num_layers: int = 3, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                hidden_size=hidden_size,
                intermediate_size=2 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_labels=NUM_CLASSES,
            )
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (B, 10) of ``images`` (B, 1, 8, 8)."""
        return self.model(pixel_values=images).logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.val_accuracy(self(images), classes)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.test_accuracy(self(images), classes)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, or ``arguments`` in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["roundpipe", "auto"], default="roundpipe", help="auto: plain Lightning")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="workers; plain Lightning always uses one device")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="steps of an epoch, where not all of them")
    parser.add_argument("--output", type=Path, default=Path("checkpoints/vit_digits"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, saves, loads in plain Lightning and tests.

    Args:
        arguments: The command line; None for the process's own.

    Returns:
        The accuracy on the test images.
    """
    args = parse_arguments(arguments)
    L.seed_everything(args.seed)

    callbacks: list[L.Callback] = []
    strategy: RoundPipeStrategy | str = "auto"
    if args.strategy == "roundpipe":
        strategy = RoundPipeStrategy(num_microbatches=args.micro_batches)
        callbacks.append(BubbleRatioMonitor())

    trainer = L.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices if args.strategy == "roundpipe" else 1,
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        log_every_n_steps=5,
        callbacks=callbacks,
        logger=CSVLogger(args.output),
        enable_checkpointing=False,
    )
    digits = Digits()
    trainer.fit(DigitClassifier(), digits)
    if "roundpipe/bubble_ratio" in trainer.callback_metrics:
        print(f"bubble ratio: {trainer.callback_metrics['roundpipe/bubble_ratio']:.1%} of the workers' time was idle")

    checkpoint = args.output / "model.ckpt"
    trainer.save_checkpoint(checkpoint)
    model = DigitClassifier.load_from_checkpoint(checkpoint, weights_only=True)
    plain = L.Trainer(accelerator=args.accelerator, devices=1, logger=False)
    (result,) = plain.test(model, digits)
    return result["test_accuracy"]


if __name__ == "__main__":
    main()
