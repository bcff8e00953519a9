"""Causal language models of transformers, trained whole or by adapters: the module and the data of the recipes.

`train_language_model.py` runs the recipes with a Trainer, `language_model_cli.py` with LightningCLI.
"""

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

NUM_BYTES = 256


class LanguageModel(L.LightningModule):
    """A causal language model; nothing here knows how it will be trained.

    Args:
        architecture: transformers' name of it, such as "qwen3", "llama", "qwen3_moe", to build it from ``config`` with
            random weights.
        config: what differs from the architecture's defaults.
        pretrained: a folder or a name to load from instead.
        lora: arguments of `peft.LoraConfig`; only the adapters train then, and the model below is kept in bfloat16.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        architecture: str = "qwen3",
        config: dict[str, Any] | None = None,
        pretrained: str | None = None,
        lora: dict[str, Any] | None = None,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.architecture = architecture
        self.config = config
        self.pretrained = pretrained
        self.lora = lora
        self.learning_rate = learning_rate
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        settings: dict[str, Any] = {"attn_implementation": "sdpa"}
        settings["dtype"] = torch.float32 if self.lora is None else torch.bfloat16
        if self.pretrained:
            self.model = AutoModelForCausalLM.from_pretrained(self.pretrained, **settings)
        else:
            config = AutoConfig.for_model(self.architecture, **(self.config or {}))
            self.model = AutoModelForCausalLM.from_config(config, **settings)
        self.model.config.use_cache = False  # a cache of keys and values is for writing; training has no use for it
        if self.lora is not None:
            self.model = get_peft_model(self.model, LoraConfig(**self.lora))
        self.model.train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, fused=True)


class Text(L.LightningDataModule):
    """Text files as rows of tokens; without a tokenizer every byte is one.

    Args:
        folder: all ``*.py``, ``*.txt`` and ``*.md`` files in it; by default Python's standard library.
        tokenizer: a folder or a name, for a pretrained model.
        sequence_length: tokens in a row.
        batch_size: rows in a batch.
    """

    def __init__(
        self,
        folder: str | None = None,
        tokenizer: str | None = None,
        sequence_length: int = 128,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.folder = folder or sysconfig.get_path("stdlib")
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        files = sorted(file for ending in ("py", "txt", "md") for file in Path(self.folder).glob(f"*.{ending}"))
        if self.tokenizer:
            encode = AutoTokenizer.from_pretrained(self.tokenizer).encode
            texts = [file.read_text("utf-8", errors="replace") for file in files]
            tokens = torch.tensor([token for text in texts for token in encode(text)])
        else:
            tokens = torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8).long()
        num_rows = len(tokens) // self.sequence_length
        self.rows = tokens[: num_rows * self.sequence_length].view(num_rows, self.sequence_length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(self.rows), self.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
