"""Weights from safetensors files: what `from_pretrained` loads, once in memory, and by name what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import WeightFileError
from lightning_roundpipe.export import convert_for_mapping
from lightning_roundpipe.loading import empty_parameters, load_pretrained
from lightning_roundpipe.runtime.mapped import FileMappings
from lightning_roundpipe.runtime.weight_files import TensorSpec, write_weights
from tests.helpers.equivalence import BatchDealer, assert_results_close, train, trainer_for
from tests.helpers.memory import peak_memory
from tests.helpers.models import token_batches

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, tie_word_embeddings=False),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4),
}


def saved(folder: Path, name: str = "qwen3", **options: Any) -> Any:
    """A model with random weights that has been saved to ``folder`` in several files."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)  # norms, too: ones everywhere would hide an exchange
    model.save_pretrained(folder, **{"max_shard_size": "40KB", **options})
    return model


def built(name: str = "qwen3", context: Callable[[], Any] = empty_parameters) -> Any:
    with context():
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def meta() -> Any:
    return torch.device("meta")


def assert_same_model(expected: nn.Module, found: nn.Module) -> None:
    one, two = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (expected, found))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
        assert tensor.requires_grad == two[name].requires_grad


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("context", [empty_parameters, meta])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_from_pretrained(tmp_path: Path, name: str, context: Callable[[], Any], mmap: bool) -> None:
    saved(tmp_path, name)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = built(name, context)
    assert load_pretrained(model, tmp_path, mmap=mmap, progress=False) == ([], [])
    assert_same_model(expected, model)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (
        expected.get_output_embeddings().weight is expected.get_input_embeddings().weight
    )


def test_dtype_is_the_modules_own(tmp_path: Path) -> None:
    model = saved(tmp_path)
    half = built().to(torch.bfloat16)
    load_pretrained(half, tmp_path, progress=False)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(torch.bfloat16)), name


@pytest.mark.parametrize("mmap", [True, False])
def test_parameters_with_memory_stay_the_same_objects(tmp_path: Path, mmap: bool) -> None:
    model = saved(tmp_path)
    found = built(context=lambda: torch.device("cpu"))
    before = dict(found.named_parameters())
    load_pretrained(found, tmp_path, mmap=mmap, progress=False)
    assert_same_model(model, found)
    assert all(parameter is before[name] for name, parameter in found.named_parameters())


def test_files_do_not_change_when_weights_do(tmp_path: Path) -> None:
    model = saved(tmp_path)
    found = built()
    load_pretrained(found, tmp_path, progress=False)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(1.0)
    again = built()
    load_pretrained(again, tmp_path, progress=False)
    assert_same_model(model, again)


def test_any_module_by_equal_or_given_names(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    safetensors.save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load_pretrained(target, tmp_path / "w.safetensors", progress=False)
    assert_same_model(source, target)
    safetensors.save_file({f"net.{k}": v for k, v in source.state_dict().items()}, tmp_path / "p.safetensors")
    target = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load_pretrained(target, tmp_path / "p.safetensors", rename=lambda name: name.removeprefix("net."), progress=False)
    assert_same_model(source, target)


# ---------------------------------------------------------------------------------------------------- what goes wrong


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_and_unexpected_keys_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_index(tmp_path, lambda names: names.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightFileError, match=r"missing `model\.layers\.1\.mlp\.up_proj\.weight`"):
        load_pretrained(built(), tmp_path, progress=False)
    smaller = built()
    del smaller.model.layers[2]
    with pytest.raises(WeightFileError, match=r"unexpected `model\.layers\.2\..* and 6 more"):
        load_pretrained(smaller, tmp_path, progress=False)


def test_not_strict_returns_the_keys_and_leaves_them(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_index(tmp_path, lambda names: names.pop("model.norm.weight"))
    model = built(context=lambda: torch.device("cpu"))
    assert load_pretrained(model, tmp_path, strict=False, progress=False) == (["model.norm.weight"], [])
    assert torch.equal(model.model.norm.weight, torch.ones(32))


def test_other_shapes_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    with empty_parameters():
        other = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**{**SMALL, "vocab_size": 65}))
    with pytest.raises(WeightFileError, match=r"`.*weight` is \[64, 32\] in the files and \[65, 32\] in the model"):
        load_pretrained(other, tmp_path, progress=False)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(WeightFileError, match="snapshot_download"):
        load_pretrained(built(), tmp_path / "nowhere", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightFileError, match=r"must hold model\.safetensors"):
        load_pretrained(built(), tmp_path / "empty", progress=False)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    for damaged, message in ((content[:-10], "ends before"), (b"x" * 100, "not a safetensors file")):
        shard.write_bytes(damaged)
        with pytest.raises(WeightFileError, match=f"{shard.name} .*{message}"):
            load_pretrained(built(), tmp_path, progress=False)
    shard.unlink()
    with pytest.raises(WeightFileError, match=f"lists {shard.name}, which is not there"):
        load_pretrained(built(), tmp_path, progress=False)


def test_buffers_that_nobody_can_compute_are_named(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("scale", torch.ones(2), persistent=False)

    safetensors.save_file(Scaled().state_dict(), tmp_path / "w.safetensors")
    with torch.device("meta"):
        empty = Scaled()
    with pytest.raises(WeightFileError, match=r"`scale`, which are on the meta device.*empty_parameters"):
        load_pretrained(empty, tmp_path / "w.safetensors", progress=False)
    with empty_parameters():
        good = Scaled()
    load_pretrained(good, tmp_path / "w.safetensors", progress=False)
    assert torch.equal(good.scale, torch.ones(2))


# ------------------------------------------------------------------------------------------------------- in a Trainer


class Pretrained(L.LightningModule):
    """Loads its model in ``configure_model``; ``how`` does it."""

    def __init__(self, how: Callable[[], nn.Module], learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.how = how
        self.learning_rate = learning_rate
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.how()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("context", [empty_parameters, meta])
def test_configure_model_trains_like_from_pretrained(tmp_path: Path, name: str, context: Callable[[], Any]) -> None:
    saved(tmp_path, name)

    def ours() -> Any:
        model = built(name, context)
        load_pretrained(model, tmp_path, progress=False)
        return model.train()

    def theirs() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()

    expected = train(lambda: Pretrained(theirs), token_batches())
    # One micro-batch: the balancing loss of experts is a product of means.
    found = train(lambda: Pretrained(ours), token_batches(), RoundPipeStrategy(1 if "moe" in name else 3), 2)
    assert_results_close(expected, found, rtol=1e-5)


@pytest.mark.parametrize("empty_init", [True, False, None])
def test_init_module_then_load(tmp_path: Path, empty_init: bool | None) -> None:
    model = saved(tmp_path)
    trainer = trainer_for(RoundPipeStrategy(3), 2)
    with trainer.init_module(empty_init=empty_init):
        module = Pretrained(lambda: built(context=lambda: torch.device("cpu")), learning_rate=0.0)
        module.configure_model()
    load_pretrained(module.model, tmp_path, progress=False)
    trainer.fit(module, BatchDealer(token_batches()))
    for name, parameter in module.model.named_parameters():
        # Not the last bits: weight decay with a learning rate of zero changes nothing.
        assert torch.equal(parameter, model.get_parameter(name)), name


# ------------------------------------------------------------------------------------------------------------- memory


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(24))


@pytest.mark.parametrize("dtype, mmap", [("float32", True), ("float32", False), ("bfloat16", False)])
def test_one_copy_in_memory(tmp_path: Path, dtype: str, mmap: bool) -> None:
    """192 MiB of weights in three files."""
    value = torch.full((2048, 1024), 0.5)
    names = [f"layers.{layer}.weight" for layer in range(24)]
    specs = {name: TensorSpec(value.dtype, value.shape) for name in names}
    write_weights(tmp_path, specs, ((name, value) for name in names), 8 * value.nbytes)
    with peak_memory() as grown:
        with empty_parameters():
            model = Big().to(getattr(torch, dtype))
        load_pretrained(model, tmp_path, mmap=mmap, progress=False)
        peak_bytes = grown()
    assert float(model.layers[-1].weight[-1, -1].detach()) == 0.5
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes == 24 * 2**21 * (4 if dtype == "float32" else 2)
    # Mapped weights are not read at all yet.
    limit = 0.1 * weight_bytes if mmap else 1.1 * weight_bytes + 64 * 2**20 * (dtype == "bfloat16")
    assert (0 if mmap else 0.9 * weight_bytes) <= peak_bytes <= limit


# ------------------------------------------------------------------------------------------------ all of it is mapped


def test_experts_can_be_mapped_once_they_are_converted(tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", "qwen3_moe")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    plain, mapped = built("qwen3_moe"), built("qwen3_moe", meta)
    load_pretrained(plain, tmp_path / "theirs", progress=False)
    convert_for_mapping(mapped, tmp_path / "theirs", tmp_path / "ours", max_shard_size="30KB")
    assert all(parameter.is_meta for parameter in mapped.parameters())
    mapped = built("qwen3_moe")
    load_pretrained(mapped, tmp_path / "ours", progress=False)
    assert_same_model(model, mapped)
    files = FileMappings()
    assert all(parameter in files for parameter in mapped.parameters())
    assert not all(parameter in files for parameter in plain.parameters())
    assert (tmp_path / "ours" / "config.json").exists() and (tmp_path / "ours" / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3"])
def test_conversion_gives_the_dtype_of_the_module(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "theirs", name)
    convert_for_mapping(built(name, meta).bfloat16(), tmp_path / "theirs", tmp_path / "ours")
    half = built(name).bfloat16()
    load_pretrained(half, tmp_path / "ours", progress=False)
    files = FileMappings()
    for key, parameter in half.named_parameters():
        assert parameter in files and torch.equal(parameter, model.get_parameter(key).bfloat16())


def test_conversion_names_what_does_not_fit(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    edit_index(tmp_path / "theirs", lambda names: names.pop("model.norm.weight"))
    with pytest.raises(WeightFileError, match=r"missing model\.norm\.weight"):
        convert_for_mapping(built(), tmp_path / "theirs", tmp_path / "ours")
    saved(tmp_path / "experts", "qwen3_moe")
    edit_index(
        tmp_path / "experts",
        lambda names: [names.pop(key) for key in list(names) if "layers.1.mlp.experts" in key],
    )
    with pytest.raises(WeightFileError, match="was announced, but did not come"):
        convert_for_mapping(built("qwen3_moe"), tmp_path / "experts", tmp_path / "ours")
