"""What is a unit: by structure for common ways to build a model, and by name where the user says so."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_roundpipe.runtime.units import Unit, find_units, tensor_bytes
from tests.helpers.models import CASES, Block


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Wrapper(nn.Module):
    """Holds other modules under the names given; ``loose`` is a parameter of its own."""

    def __init__(self, loose: bool = False, **children: nn.Module) -> None:
        super().__init__()
        if loose:
            self.loose = nn.Parameter(torch.zeros(4))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self) -> None: ...


def names(root: nn.Module, units: str | list[str] = "auto") -> list[str]:
    return [unit.name for unit in find_units(root, units)]


def parametrized(module: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(module, "weight", nn.Identity())
    return module


def shared_twice() -> nn.Module:
    inner = linear()
    return Wrapper(first=inner, second=inner, third=linear())


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "leaf modules": (lambda: Wrapper(a=linear(), b=nn.LayerNorm(4)), ["a", "b"]),
    "modules without parameters": (lambda: Wrapper(a=nn.ReLU(), b=linear(), c=nn.Dropout()), ["b"]),
    "nested wrappers": (lambda: Wrapper(a=Wrapper(b=Wrapper(c=linear())), d=linear()), ["a.b.c", "d"]),
    "list of blocks": (lambda: Wrapper(h=nn.ModuleList([Block(4), Block(4)])), ["h.0", "h.1"]),
    "list of one block": (lambda: Wrapper(h=nn.ModuleList([Block(4)])), ["h.0"]),
    "list of lists": (
        lambda: nn.ModuleList([nn.ModuleList([linear(), linear()]), nn.ModuleList([linear()])]),
        ["0.0", "0.1", "1.0"],
    ),
    "list of different models": (
        lambda: nn.ModuleList([Block(4), linear(), nn.ReLU()]),
        ["0.norm", "0.up", "0.down", "1"],
    ),
    "list of blocks of two kinds": (
        lambda: nn.ModuleList([Block(4), Wrapper(a=linear()), Block(4), Wrapper(a=linear())]),
        ["0", "1", "2", "3"],
    ),
    "dict of blocks": (lambda: Wrapper(h=nn.ModuleDict({"x": Block(4), "y": Block(4)})), ["h.x", "h.y"]),
    "sequence of blocks": (lambda: Wrapper(net=nn.Sequential(Block(4), nn.ReLU(), Block(4))), ["net.0", "net.2"]),
    "sequence that is the root": (lambda: nn.Sequential(linear(), nn.GELU(), linear()), ["0", "2"]),
    "sequence of sequences": (
        lambda: nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear(), linear())),
        ["0.0", "1.0", "1.1"],
    ),
    "a single block in a sequence is no list": (
        lambda: nn.Sequential(Block(4)),
        ["0.norm", "0.up", "0.down"],
    ),
    "loose parameter beside children": (lambda: Wrapper(loose=True, a=linear()), ["a"]),
    "loose parameter alone": (lambda: Wrapper(a=Wrapper(loose=True), b=linear()), ["a", "b"]),
    "loose parameter of the root": (lambda: Wrapper(loose=True), []),
    "parameter list": (
        lambda: Wrapper(w=nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)]), a=linear()),
        ["w", "a"],
    ),
    "multi-head attention reads its child's weights": (
        lambda: Wrapper(attention=nn.MultiheadAttention(4, 2), head=linear()),
        ["attention", "head"],
    ),
    "recurrent network": (lambda: Wrapper(rnn=nn.LSTM(4, 4, num_layers=2), head=linear()), ["rnn", "head"]),
    "parametrized linear": (lambda: Wrapper(a=parametrized(linear()), b=linear()), ["a", "b"]),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(linear()), nn.ReLU()), ["0"]),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False),
        ["layers.0", "layers.1"],
    ),
    "a shared module counts once": (shared_twice, ["first", "third"]),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), []),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_units_by_structure(structure: str) -> None:
    build, expected = STRUCTURES[structure]
    assert names(build()) == expected


def test_a_parametrized_container_is_still_cut_into_its_blocks() -> None:
    model = Wrapper(encoder=Wrapper(loose=True, h=nn.ModuleList([Block(4), Block(4)])))
    parametrize.register_parametrization(model.encoder, "loose", nn.Identity())
    assert {"encoder.h.0", "encoder.h.1"} < set(names(model))


def test_a_list_of_one_model_is_cut_into_its_layers() -> None:
    """A list of one block is a model with one layer; what holds a list of blocks itself is no block."""
    encoder = Wrapper(embed=linear(), h=nn.ModuleList([Block(4), Block(4)]))
    assert names(Wrapper(models=nn.ModuleList([encoder]))) == ["models.0.embed", "models.0.h.0", "models.0.h.1"]


LORA = "model.base_model.model."
TRANSFORMERS = {
    "qwen3_tied": [
        "model.model.embed_tokens",
        *(f"model.model.layers.{layer}" for layer in range(3)),
        "model.model.norm",
        "model.lm_head",
    ],
    "gpt2": [
        "model.transformer.wte",
        "model.transformer.wpe",
        *(f"model.transformer.h.{layer}" for layer in range(3)),
        "model.transformer.ln_f",
        "model.lm_head",
    ],
    "t5": [
        "model.shared",
        *(
            f"model.{stack}.{part}"
            for stack in ("encoder", "decoder")
            for part in ("embed_tokens", "block.0", "block.1", "final_layer_norm")
        ),
        "model.lm_head",
    ],
    "llama_lora": [
        f"{LORA}model.embed_tokens",
        *(f"{LORA}model.layers.{layer}" for layer in range(4)),
        f"{LORA}model.norm",
        f"{LORA}lm_head.original_module",
        f"{LORA}lm_head.modules_to_save.default",
    ],
}


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_units_of_transformers_models(case: str) -> None:
    """Each layer, embedding, final norm and head."""
    found = names(CASES[case].module())
    if case == "t5":  # Whether the three names of the one embedding are one module depends on the version.
        found = [name for name in found if not name.endswith(("shared", "embed_tokens"))]
        expected = [name for name in TRANSFORMERS[case] if not name.endswith(("shared", "embed_tokens"))]
        assert found == expected
    else:
        assert found == TRANSFORMERS[case]


def test_units_of_a_vision_transformer() -> None:
    """The class token and the position embeddings are loose: user code looks them up between units."""
    module = CASES["vit"].module()
    units = find_units(module)
    layers = [unit for unit in units if type(unit.module).__name__ == "ViTLayer"]
    assert len(layers) == 3
    assert {type(unit.module).__name__ for unit in units} == {"Conv2d", "ViTLayer", "LayerNorm", "Linear"}
    owned = {id(parameter) for unit in units for parameter in unit.parameters}
    loose = [name.rpartition(".")[2] for name, parameter in module.named_parameters() if id(parameter) not in owned]
    assert sorted(loose) == ["cls_token", "position_embeddings"]


@pytest.mark.parametrize("case", CASES)
def test_units_cover_all_but_loose_parameters(case: str) -> None:
    """A module that owns parameters is in exactly one unit, or holds units; units come in module order."""
    module = CASES[case].module()
    units = find_units(module)
    for name, owner in module.named_modules():
        if owner._parameters:
            inside = [unit for unit in units if owner in unit.submodules]
            below = [unit for unit in units if any(inner is unit.module for inner in owner.modules())]
            assert len(inside) == 1 or (not inside and below), name
    order = [path for path, _ in module.named_modules()]
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=order.index)
    assert [unit.index for unit in units] == list(range(len(units)))


def test_a_unit_knows_its_tensors() -> None:
    shared = linear()
    block = Wrapper(a=shared, b=shared, c=nn.BatchNorm1d(3))
    unit = Unit(2, "blocks.0", block)
    assert str(unit) == "`blocks.0`"
    assert str(Unit(0, "", block)) == "`Wrapper`"
    assert [id(parameter) for parameter in unit.parameters] == [id(parameter) for parameter in block.parameters()]
    assert unit.submodules == tuple(block.modules())
    assert unit.num_bytes == 4 * (4 * 4 + 4 + 3 + 3)


def test_tensor_bytes_counts_elements_not_storage() -> None:
    assert tensor_bytes(torch.zeros(10, dtype=torch.float64)[:3]) == 24
    assert tensor_bytes(torch.zeros(3, dtype=torch.bfloat16)) == 6
    assert tensor_bytes(torch.zeros(0)) == 0


# ------------------------------------------------------------------------------------------------------ explicit units


def model() -> nn.Module:
    return Wrapper(
        embed=linear(),
        body=nn.ModuleList([Wrapper(x=Block(4), y=Block(4)) for _ in range(2)]),
        head=nn.Sequential(linear(), nn.ReLU(), linear()),
    )


def test_explicit_class() -> None:
    units = ["embed", "body.0.x", "body.0.y", "body.1.x", "body.1.y", "head.0", "head.2"]
    assert names(model(), "Block") == units
    assert names(model(), ["Block"]) == units


def test_explicit_paths_and_classes_together() -> None:
    assert names(model(), ["head", "Block", "embed"]) == [
        "embed", "body.0.x", "body.0.y", "body.1.x", "body.1.y", "head",
    ]  # fmt: skip


def test_what_explicit_units_do_not_cover_is_cut_as_ever() -> None:
    assert names(model(), ["body.0.x.up"]) == [
        "embed", "body.0.x.norm", "body.0.x.up", "body.0.x.down", "body.0.y.norm", "body.0.y.up", "body.0.y.down",
        "body.1", "head.0", "head.2",
    ]  # fmt: skip


def test_the_root_can_be_a_unit() -> None:
    assert names(nn.Sequential(linear(), linear()), "Sequential") == [""]


@pytest.mark.parametrize(
    "name, hint",
    [
        ("Blok", "Did you mean 'Block'?"),
        ("body.0.z", "'body.0.y'"),
        ("haed", "'head'"),
        ("completely different", "matches none in Wrapper.$"),
        ("ReLU", "with parameters, but 'ReLU' matches none"),
    ],
)
def test_a_name_that_matches_nothing_is_refused_with_the_closest_ones(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="`units` must name module classes or dotted paths") as caught:
        find_units(model(), [name])
    caught.match(hint)


def test_overlapping_units_are_refused() -> None:
    with pytest.raises(ValueError, match="selects both 'body.0' and 'body.0.x' inside it. Name only one"):
        find_units(model(), ["body.0", "Block"])


def test_a_shared_module_can_be_named_by_any_of_its_paths() -> None:
    block = Block(4)
    assert names(Wrapper(x=block, y=Wrapper(z=block)), ["y.z"]) == ["x"]


def test_a_class_that_holds_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="selects both '' and 'body.0' inside it"):
        find_units(model(), ["Wrapper"])


class Layer(nn.Module):
    """Attention, a norm and experts: packed, or in a list that is never called itself."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.attention = Wrapper(q=linear(), k=linear())
        self.norm = nn.LayerNorm(4)
        self.mlp = Wrapper(router=nn.Linear(4, 2))
        self.mlp.experts = Wrapper(loose=True) if packed else nn.ModuleList(Block(4) for _ in range(3))
        if packed:
            self.mlp.experts.weight = nn.Parameter(torch.zeros(8, 4, 4))

    def forward(self) -> None: ...


def test_a_block_that_is_too_large_is_cut_into_what_can_be_called() -> None:
    """Parts that fit are units as they are; the part that does not is cut further; a list is no unit."""
    packed = Wrapper(layers=nn.ModuleList([Layer(packed=True), Layer(packed=True)]), head=linear())
    whole = ["layers.0", "layers.1", "head"]
    assert names(packed) == whole
    size = find_units(packed)[0].num_bytes
    assert [unit.name for unit in find_units(packed, max_bytes=size)] == whole

    parts = ["attention", "norm", "mlp"]
    found = [unit.name for unit in find_units(packed, max_bytes=size - 1)]
    assert found == [f"layers.{layer}.{part}" for layer in (0, 1) for part in parts] + ["head"]

    # The experts, one packed parameter, are nearly all of `mlp`: to cut that would not help.
    assert [unit.name for unit in find_units(packed, max_bytes=200)] == found

    listed = nn.ModuleList([Layer(packed=False), Layer(packed=False)])
    parts = ["attention", "norm", "mlp.router", "mlp.experts.0", "mlp.experts.1", "mlp.experts.2"]
    found = [unit.name for unit in find_units(listed, max_bytes=400)]
    assert found == [f"{layer}.{part}" for layer in (0, 1) for part in parts]


def test_what_has_no_parts_stays_whole_however_large() -> None:
    blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    assert [unit.name for unit in find_units(blocks, max_bytes=1)] == ["0", "1"]
    assert [unit.name for unit in find_units(nn.ModuleList([Block(4), Block(4)]), ["Block"], max_bytes=1)] == ["0", "1"]
