"""Small LightningModules, one for every way of building or calling a model that must train unchanged.

Nothing is downloaded: transformers models are built from tiny configurations. Every module is float32, has no dropout
unless asked for, and comes as a :class:`Case` with its own fixed list of batches. Two calls of ``Case.module()`` or
``Case.batches()`` give equal results, whatever the state of the global generator.

Letters in shapes: B rows, S positions, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR

from lightning_roundpipe.export import export_pretrained
from lightning_roundpipe.loading import empty_parameters, load_pretrained

__all__ = [
    "CASES",
    "AuxiliaryLoss",
    "BatchNormCNN",
    "Block",
    "Case",
    "Classifier",
    "Counter",
    "LanguageModel",
    "Residual",
    "StepModule",
    "llama_from_files",
    "llama_lora",
    "masked_batches",
    "residual_batches",
    "seeded",
    "token_batches",
    "vector_batches",
]

T = TypeVar("T")
VOCABULARY = 64
HIDDEN = 32
Batches = list[Any]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Args:
        name: the word that test ids show.
        module: builds the module; always the same weights.
        batches: builds the batches of one epoch; always the same.
        float64: whether torch has kernels to run it in float64.
    """

    name: str
    module: Callable[[], L.LightningModule]
    batches: Callable[[], Batches]
    float64: bool = True

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {}
"""All cases whose result must not depend on how the batch is split, by name."""


def seeded(build: Callable[[], T], seed: int = 0) -> T:
    """Returns ``build()`` as it is with the global generator seeded, and leaves that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


Factory = Callable[[], L.LightningModule]


def case(name: str, batches: Callable[[], Batches], float64: bool = True) -> Callable[[Factory], Factory]:
    """Enters the decorated factory into :data:`CASES`, seeded."""

    def enter(build: Factory) -> Factory:
        CASES[name] = Case(name, lambda: seeded(build), batches, float64)
        return build

    return enter


# ---------------------------------------------------------------------------------------------------------- batches


def token_batches(num: int = 5, rows: int = 6, positions: int = 8, ignored: bool = False) -> Batches:
    """Batches ``{"input_ids", "labels"}`` of shape (B, S).

    With ``ignored``, row r keeps r % S labels and the rest are -100: some micro-batches then have no label at all.
    """
    generator = torch.Generator().manual_seed(num * rows)
    batches = []
    for _ in range(num):
        tokens = torch.randint(VOCABULARY, (rows, positions), generator=generator)
        labels = tokens.clone()
        if ignored:
            labels[torch.arange(positions) >= (torch.arange(rows) % positions)[:, None]] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def masked_batches(num: int = 5, rows: int = 6, positions: int = 8) -> Batches:
    """Masked language modelling: about a third of the labels are kept, and there is an attention mask."""
    generator = torch.Generator().manual_seed(17)
    batches = token_batches(num, rows, positions)
    for batch in batches:
        batch["labels"][torch.rand(rows, positions, generator=generator) > 0.3] = -100
        batch["attention_mask"] = (torch.arange(positions) < (3 + torch.arange(rows))[:, None]).long()
    return batches


def vector_batches(*shape: int, num: int = 5, rows: int = 6, classes: int = 10) -> Batches:
    """Tuples (inputs of (B, *shape), class labels of (B,))."""
    generator = torch.Generator().manual_seed(sum(shape) + rows)
    return [
        (torch.randn(rows, *shape, generator=generator), torch.randint(classes, (rows,), generator=generator))
        for _ in range(num)
    ]


def residual_batches(num: int = 4, rows: int = 6, positions: int = 5) -> Batches:
    """Tuples (tokens of (B, S), next tokens of (B, S)) for :class:`Residual`, vocabulary 32."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randint(32, (rows, positions + 1), generator=generator) for _ in range(num)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in draws]


# ----------------------------------------------------------------------------------------------------------- modules


class StepModule(L.LightningModule):
    """A LightningModule whose subclasses only say what the loss is.

    ``loss(batch)`` must be a mean over rows or over valid labels. It is logged as ``loss``. The optimizer is AdamW with
    a schedule per step. Its epsilon is large because a gradient that is zero but for rounding (the bias of attention
    keys) would otherwise be blown up to a full-sized update, in which two correct runs differ.
    """

    learning_rate = 1e-2
    epsilon = 1e-3

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, eps=self.epsilon, weight_decay=0.1)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Classifier(StepModule):
    """Cross entropy of ``self.net(inputs)`` for batches (inputs, class labels)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)


class LanguageModel(StepModule):
    """A transformers model that computes its own loss from ``labels``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        with torch.no_grad():  # Biases that start at zero have no scale of their own to compare against.
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


@case("qwen3_tied", token_batches)
def _qwen3() -> L.LightningModule:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return LanguageModel(Qwen3ForCausalLM(config))


@case("qwen3_moe", token_batches, float64=False)
def _qwen3_moe(experts: str = "grouped_mm") -> L.LightningModule:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    config._experts_implementation = experts
    return LanguageModel(Qwen3MoeForCausalLM(config))


case("qwen3_moe_eager", token_batches)(lambda: _qwen3_moe("eager"))


@case("gpt2", token_batches)
def _gpt2() -> L.LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=HIDDEN, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, initializer_range=0.2, bos_token_id=1, eos_token_id=1, loss_type="ForCausalLM",
    )  # fmt: skip
    return LanguageModel(GPT2LMHeadModel(config))


@case("t5", token_batches)
def _t5() -> L.LightningModule:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return LanguageModel(T5ForConditionalGeneration(config))


@case("bert_mlm", masked_batches)
def _bert() -> L.LightningModule:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    return LanguageModel(BertForMaskedLM(config))


def _pixel_batches() -> Batches:
    return [{"pixel_values": inputs, "labels": labels} for inputs, labels in vector_batches(1, 8, 8)]


@case("vit", _pixel_batches)
def _vit() -> L.LightningModule:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=4, num_channels=1, num_labels=10, initializer_range=0.2,
    )  # fmt: skip
    return LanguageModel(ViTForImageClassification(config))


def llama_lora() -> L.LightningModule:
    """A Llama with LoRA on queries and values and a fully trained head; everything else is frozen."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return LanguageModel(get_peft_model(LlamaForCausalLM(config), lora))


case("llama_lora", token_batches)(llama_lora)


def llama_from_files(folder: Path, *, tied: bool) -> LanguageModel:
    """A Llama whose weights are mapped from ``folder``, where they are put if it is empty, with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=tied,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if not (folder / "config.json").exists():
        export_pretrained(LlamaForCausalLM(config), folder)
    with empty_parameters():
        model = LlamaForCausalLM(config)
    load_pretrained(model, folder, progress=False)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return LanguageModel(get_peft_model(model, lora))


@case("mlp", lambda: vector_batches(16))
def _mlp() -> L.LightningModule:
    return Classifier(
        nn.Sequential(nn.Linear(16, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 10))
    )


@case("cnn", lambda: vector_batches(1, 8, 8))
def _cnn() -> L.LightningModule:
    return Classifier(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, 10),
        )
    )  # fmt: skip


class BatchNormCNN(Classifier):
    """A CNN with batch normalisation: its result does depend on the split, so it is not among :data:`CASES`."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
            )
        )  # fmt: skip


class Recurrent(Classifier):
    """Two layers of an RNN over (B, S, 16), then a linear head on the last position."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__(kind(16, HIDDEN, num_layers=2, batch_first=True))
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.net(inputs)
        return self.head(outputs[:, -1])


@case("lstm", lambda: vector_batches(5, 16))
def _lstm() -> L.LightningModule:
    return Recurrent(nn.LSTM)


@case("gru", lambda: vector_batches(5, 16))
def _gru() -> L.LightningModule:
    return Recurrent(nn.GRU)


@case("transformer_encoder", lambda: vector_batches(5, HIDDEN))
def _transformer_encoder() -> L.LightningModule:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, dim_feedforward=48, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
    return Classifier(nn.Sequential(encoder, nn.Flatten(), nn.Linear(5 * HIDDEN, 10)))


class Block(nn.Module):
    """A residual block: ``x + dropout(linear(relu(linear(norm(x)))))`` over the last dimension."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Residual(StepModule):
    """The model of most feature tests: embedding, residual blocks, linear head; batches of (tokens, next tokens).

    Args:
        dropout: probability in every block.
        tied: whether the head uses the weight of the embedding.
        optimizer: called with the parameters; SGD with learning rate 0.1 if not given.
    """

    def __init__(
        self,
        num_blocks: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        vocabulary: int = 32,
        width: int = 16,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.make_optimizer = optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is not None:
            return self.make_optimizer(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)


case("residual", residual_batches)(Residual)
case("residual_tied", residual_batches)(lambda: Residual(tied=True))


class CalledTwice(StepModule):
    """``training_step`` calls the model on two views of every row and pulls the two results together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, HIDDEN), Block(HIDDEN), Block(HIDDEN))
        self.head = nn.Linear(HIDDEN, 10)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        first, second = self.encoder(inputs), self.encoder(inputs.roll(1, dims=-1))
        distance = 1 - F.cosine_similarity(first, second, dim=-1).mean()
        return F.cross_entropy(self.head(first), labels) + distance


@case("called_twice", lambda: vector_batches(16))
def _called_twice() -> L.LightningModule:
    return CalledTwice()


@case("weight_norm", lambda: vector_batches(16))
def _weight_norm() -> L.LightningModule:
    return Classifier(
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(16, HIDDEN)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN)),
            nn.Tanh(),
            parametrizations.orthogonal(nn.Linear(HIDDEN, 10)),
        )
    )


@case("weight_norm_by_hook", lambda: vector_batches(16))
def _weight_norm_by_hook() -> L.LightningModule:
    from torch.nn.utils import weight_norm  # The older one: a forward pre-hook that assigns `module.weight`.

    return Classifier(
        nn.Sequential(
            weight_norm(nn.Linear(16, HIDDEN)), nn.Tanh(), weight_norm(nn.Linear(HIDDEN, HIDDEN)), nn.Linear(HIDDEN, 10)
        )
    )


class LooseParameter(Classifier):
    """Parameters of the LightningModule itself: one used before the blocks, one in ``training_step`` only."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Block(16), Block(16), nn.Linear(16, 10)))
        self.shift = nn.Parameter(torch.randn(16))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self(inputs + self.shift) * self.temperature.exp(), labels)


@case("loose_parameter", lambda: vector_batches(16))
def _loose_parameter() -> L.LightningModule:
    return LooseParameter()


class Down(nn.Module):
    """Takes and returns a dict: the current tensor and the tuple of tensors for the skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width // 2)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = state["x"]
        return {"x": torch.tanh(self.linear(x)), "skips": (*state["skips"], x)}


class Up(nn.Module):
    """Takes the skip connection of its level as a second argument and returns a tuple with a detached statistic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width // 2, width)

    def forward(self, x: Tensor, *, skip: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.linear(x)) + skip
        return x, x.detach().mean()


class UShape(Classifier):
    """A U-shaped network: tuples and dicts between blocks, every skip connection is used far from where it is made."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, HIDDEN))
        self.downs = nn.ModuleList(Down(HIDDEN >> level) for level in range(3))
        self.ups = nn.ModuleList(Up(HIDDEN >> level) for level in reversed(range(3)))
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.net(inputs), "skips": ()}
        for down in self.downs:
            state = down(state)
        x = state["x"]
        for up, skip in zip(self.ups, reversed(state["skips"]), strict=True):
            x, _ = up(x, skip=skip)
        return self.head(x)


@case("u_shape", lambda: vector_batches(16))
def _u_shape() -> L.LightningModule:
    return UShape()


class LayerDrop(StepModule):
    """Every row says how deep it wants to go; a block that no row of the (micro-)batch wants is not called at all.

    The result does not depend on the split, but the calls do: micro-batches of one step call different blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 10)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, depth = self.embed(batch["inputs"]), batch["depth"]
        for level, block in enumerate(self.blocks):
            wanted = depth > level
            if wanted.any():
                x = torch.where(wanted[:, None], block(x), x)
        return F.cross_entropy(self.head(x), batch["classes"])


def _layer_drop_batches() -> Batches:
    rows = torch.arange(6)
    return [
        {"inputs": inputs, "classes": classes, "depth": (rows * rows + step) % 5}
        for step, (inputs, classes) in enumerate(vector_batches(16))
    ]


@case("layer_drop", _layer_drop_batches)
def _layer_drop() -> L.LightningModule:
    return LayerDrop()


class SharedBlock(Classifier):
    """One block, called four times in a row, as in Albert."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, HIDDEN))
        self.block = Block(HIDDEN)
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.net(inputs)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


@case("shared_block", lambda: vector_batches(16))
def _shared_block() -> L.LightningModule:
    return SharedBlock()


class DirectHead(Classifier):
    """The loss multiplies with the weight of the head itself, as fused loss kernels do; the head is never called."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, HIDDEN), Block(HIDDEN), Block(HIDDEN)))
        self.head = nn.Linear(HIDDEN, 10)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(F.linear(self.net(inputs), self.head.weight, self.head.bias), labels)


@case("direct_head", lambda: vector_batches(16))
def _direct_head() -> L.LightningModule:
    return DirectHead()


class SparseEmbedding(StepModule):
    """An embedding with sparse gradients, trained with SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, sparse=True)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.blocks(self.embed(batch["input_ids"])))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _unlabelled_batches() -> Batches:
    return [{"input_ids": batch["input_ids"]} for batch in token_batches()]


@case("sparse_embedding", _unlabelled_batches)
def _sparse_embedding() -> L.LightningModule:
    return SparseEmbedding()


class SparseAdamEmbedding(SparseEmbedding):
    """Only the sparse embedding trains, with SparseAdam; the rest is frozen."""

    def configure_optimizers(self) -> Any:
        self.blocks.requires_grad_(False)
        self.head.requires_grad_(False)
        return torch.optim.SparseAdam(self.embed.parameters(), lr=0.1, eps=1e-3)


@case("sparse_adam", _unlabelled_batches)
def _sparse_adam() -> L.LightningModule:
    return SparseAdamEmbedding()


class BlockWithAuxiliaryLoss(nn.Module):
    """Returns its output and, as MoE layers do, a loss of its own: a mean over rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)
        self.gate = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(-1)
        return self.block(x) * gates.max(-1, keepdim=True).values, gates.square().sum(-1).mean()


class AuxiliaryLoss(StepModule):
    """Blocks return auxiliary losses as their second output; the step adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, HIDDEN)
        self.blocks = nn.ModuleList(BlockWithAuxiliaryLoss(HIDDEN) for _ in range(3))
        self.head = nn.Linear(HIDDEN, 10)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        x = self.embed(inputs)
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, extra = block(x)
            auxiliary = auxiliary + extra
        self.log("auxiliary", auxiliary)
        return F.cross_entropy(self.head(x), labels) + 0.1 * auxiliary


@case("auxiliary_loss", lambda: vector_batches(16))
def _auxiliary_loss() -> L.LightningModule:
    return AuxiliaryLoss()


class Counter(nn.Module):
    """Adds one to a buffer, and remembers the greatest value seen, in every forward pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("greatest", torch.tensor(-torch.inf), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.greatest = torch.maximum(self.greatest, x.detach().max())
        return x
