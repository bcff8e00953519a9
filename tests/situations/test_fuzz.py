"""Random modules, batches, flags, options and workers against plain Lightning; what differs shrinks to an example.

``FUZZ_EXAMPLES=2000 pytest tests/situations/test_fuzz.py --timeout 1000`` looks longer than the default.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import TrainResult, assert_results_close, assert_results_equal, train
from tests.helpers.models import Block, seeded
from tests.helpers.shim import gpu_workers_on_the_host

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
WIDTH = 6
CLASSES = 5
State = dict[str, Any]
Tree = tuple[Any, ...]


class Layer(nn.Module):
    """Takes and returns what flows between layers: ``x`` (B, WIDTH), skips, a mask (B,), a word, and None."""

    def next(self, state: State, x: Tensor) -> State:
        return {**state, "x": x}


class Dense(Layer):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "block": lambda: Block(WIDTH)}[kind]()

    def forward(self, state: State) -> State:
        return self.next(state, torch.tanh(self.inner(state["x"])))


class Odd(Layer):
    """Parameters that are empty, of integers, or never used; a buffer that is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.codes = nn.Parameter(torch.arange(WIDTH) % 3, requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(self, state: State) -> State:
        return self.next(state, state["x"] * self.weight * self.codes + self.empty.sum(0) + self.shift)


class Push(Layer):
    """Keeps ``x`` for a later layer, in a tuple."""

    def __init__(self, inner: Layer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: State) -> State:
        return self.inner({**state, "skips": (*state["skips"], state["x"])})


class Pop(Layer):
    """Adds what was kept first, if anything was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        *rest, last = [torch.zeros_like(state["x"]), *state["skips"]]
        return {**state, "x": self.linear(state["x"]) + last, "skips": tuple(rest[1:])}


class Masked(Layer):
    """Works on some rows, by a mask that is not differentiable; writes a buffer, in place or anew."""

    def __init__(self, inner: Layer, anew: bool) -> None:
        super().__init__()
        self.inner = inner
        self.anew = anew
        self.register_buffer("most", torch.zeros(()))

    def forward(self, state: State) -> State:
        if self.training:
            if self.anew:
                self.most = torch.maximum(self.most, state["mask"].any().to(self.most))
            else:
                self.most.clamp_(min=1.0)
        after = self.inner(state)
        return {**after, "x": torch.where(state["mask"][:, None], after["x"], state["x"]), "word": state["word"] + "!"}


class Chain(Layer):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, state: State) -> State:
        for layer in self.layers:
            state = layer(state)
        return state


class Twice(Layer):
    """One layer, called again; or a second layer that shares its weights."""

    def __init__(self, layer: Layer, tied: bool) -> None:
        super().__init__()
        self.first = layer
        self.second = layer
        if tied and isinstance(layer, Dense) and isinstance(layer.inner, nn.Linear):
            self.second = Dense("linear")
            self.second.inner.weight = layer.inner.weight

    def forward(self, state: State) -> State:
        return self.second(self.first(state))


class Frozen(Layer):
    def __init__(self, layer: Layer, no_grad: bool) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.no_grad = no_grad

    def forward(self, state: State) -> State:
        if not self.no_grad:
            return self.layer(state)
        with torch.no_grad():
            found = self.layer(state)["x"]
        return self.next(state, state["x"] + found)


def grow(tree: Tree) -> Layer:
    """Builds what a tree describes."""
    builders: dict[str, Callable[..., Layer]] = {
        "linear": lambda: Dense("linear"),
        "block": lambda: Dense("block"),
        "odd": Odd,
        "pop": Pop,
        "push": lambda child: Push(grow(child)),
        "masked": lambda child, anew: Masked(grow(child), anew),
        "chain": lambda children: Chain(list(map(grow, children))),
        "twice": lambda child, tied: Twice(grow(child), tied),
        "frozen": lambda child, no_grad: Frozen(grow(child), no_grad),
    }
    return builders[tree[0]](*tree[1:])


trees = st.recursive(
    st.sampled_from([("linear",), ("block",), ("odd",), ("pop",)]),
    lambda child: st.one_of(
        st.tuples(st.just("push"), child),
        st.tuples(st.just("masked"), child, st.booleans()),
        st.tuples(st.just("chain"), st.lists(child, min_size=1, max_size=4)),
        st.tuples(st.just("twice"), child, st.booleans()),
        st.tuples(st.just("frozen"), child, st.booleans()),
    ),
    max_leaves=8,
)


class Fuzzed(L.LightningModule):
    """Reads a batch of many kinds of things; trains with or without automatic optimization."""

    def __init__(self, tree: Tree, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.body = grow(tree)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.words: set[str] = set()

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        x = self.entry(batch["pair"][0] + batch["offset"]) * batch["scale"]
        if batch["ragged"] is not None:
            x = x + torch.stack([row.mean() for row in batch["ragged"]])[:, None]
        assert len(batch["names"]) == len(x)
        state = self.body({"x": x, "skips": (), "mask": batch["pair"][1] > 0, "word": "", "none": None})
        self.words.add(state["word"])
        return F.cross_entropy(self.head(state["x"]), batch["classes"])

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch["classes"]))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            if batch_idx % 2 or batch["scale"] > 0.7:
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch["classes"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def make_batch(rows: int, seed: int, ragged: bool, dtype: torch.dtype) -> dict[str, Any]:
    """A batch of ``rows`` rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "pair": (draw(rows, WIDTH), draw(rows)),
        "offset": draw(1, WIDTH),
        "classes": torch.randint(CLASSES, (rows,), generator=generator),
        "names": [f"row {row}" for row in range(rows)],
        "ragged": [draw(1 + (row + seed) % 4) for row in range(rows)] if ragged else None,
        "scale": 0.5 + 0.25 * (seed % 3),
        "nothing": None,
    }


FLAGS = st.fixed_dictionaries(
    {
        "accumulate_grad_batches": st.integers(1, 3),
        "gradient_clip_val": st.sampled_from([None, 0.1]),
        "gradient_clip_algorithm": st.sampled_from(["norm", "value"]),
        "max_epochs": st.integers(1, 2),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "num_microbatches": st.integers(1, 9),
        "optimizer_overlap": st.sampled_from(["off", "exact"]),
        "recompute": st.sampled_from(["auto", "all", "none"]),
    }
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Devices, workers per device, and a number of replica groups that divides the workers."""
    devices, per_device = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    workers = devices * per_device
    groups = [count for count in range(1, workers + 1) if workers % count == 0]
    return devices, per_device, draw(st.sampled_from(groups))


# Of 16-bit results only the size can be compared with whole batches; their bits are compared with one worker's.
PRECISIONS = {"float64": 1e-8, "32-true": 1e-4, "bf16-mixed": 0.1}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tree=trees,
    rows=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    ragged=st.booleans(),
    manual=st.booleans(),
    precision=st.sampled_from(list(PRECISIONS)),
    layout=layouts(),
    flags=FLAGS,
    options=OPTIONS,
    looks=st.booleans(),
    gpu_worker=st.integers(0, 9).map(lambda number: number == 9),
)
def test_equals_plain_lightning(
    tree: Tree,
    rows: list[int],
    ragged: bool,
    manual: bool,
    precision: str,
    layout: tuple[int, int, int],
    flags: dict[str, Any],
    options: dict[str, Any],
    looks: bool,
    gpu_worker: bool,
) -> None:
    devices, per_device, groups = layout
    if manual:
        flags = {"max_epochs": flags["max_epochs"]}
        options = {**options, "num_microbatches": 1}
    if "masked" in repr(tree):  # Its buffer is updated by one micro-batch after another: groups are refused.
        groups = 1
        options = {**options, "recompute": "auto"} if devices * per_device > 1 else options
    elif options["recompute"] == "none":
        groups = devices * per_device
    if precision != "float64":
        flags = {**flags, "precision": precision}
    dtype = torch.float64 if precision == "float64" else torch.float32
    batches = [make_batch(count, seed, ragged, dtype) for seed, count in enumerate(rows)]

    def fit(strategy: RoundPipeStrategy | str, devices: int) -> TrainResult:
        def module() -> L.LightningModule:
            return seeded(lambda: Fuzzed(tree, manual)).to(dtype)

        return train(module, batches, strategy, devices, val_batches=batches[:1], looks=looks, **flags)

    expected = fit("auto", 1)
    with pytest.MonkeyPatch.context() as patch:
        if gpu_worker:
            gpu_workers_on_the_host(patch)
        strategy = RoundPipeStrategy(workers_per_device=per_device, replica_groups=groups, **options)
        found = fit(strategy, devices)
    assert_results_close(expected, found, rtol=PRECISIONS[precision])
    assert found.module.words == expected.module.words
    if precision == "bf16-mixed":
        simple = {**options, "optimizer_overlap": "off", "recompute": "all", "replica_groups": groups}
        assert_results_equal(fit(RoundPipeStrategy(**simple), groups), found)
