"""The layers: plan <- runtime <- the Lightning face. Nobody imports upwards, and importing the package does nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_roundpipe"


@dataclass(frozen=True)
class Layer:
    """What a part of the package may see.

    Attributes:
        own: The parts of the package it may import; "" is the package itself, with its public names.
        banned: Foreign modules (with everything inside them) that it may neither import nor reach as an attribute.
    """

    own: frozenset[str]
    banned: frozenset[str]


LIGHTNING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
PURE = frozenset({"_version", "exceptions"})
LAYERS = {
    "_version": Layer(own=frozenset(), banned=LIGHTNING | {"torch"}),
    "exceptions": Layer(own=frozenset(), banned=LIGHTNING | {"torch"}),
    "plan": Layer(own=PURE | {"plan"}, banned=LIGHTNING | {"torch.cuda"}),
    "losses": Layer(own=frozenset(), banned=LIGHTNING),
    "runtime": Layer(own=PURE | {"plan", "losses", "runtime"}, banned=LIGHTNING),
}


def modules(part: str) -> Iterator[Path]:
    single = ROOT / PACKAGE / f"{part}.py"
    yield from [single] if single.exists() else sorted((ROOT / PACKAGE / part).rglob("*.py"))


def names_used(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the dotted name of every import, also inside functions, and of every attribute of a name.

    Args:
        source: The text of a module.
        package: The package that the module lies in, from which relative imports count.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def violations(source: str, package: str, layer: Layer) -> list[str]:
    found = []
    for line, name in names_used(source, package):
        top, _, rest = name.partition(".")
        foreign = any(name == banned or name.startswith(f"{banned}.") for banned in layer.banned)
        upwards = top == PACKAGE and rest.partition(".")[0] not in layer.own
        if foreign or upwards:
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("part", LAYERS)
def test_no_layer_imports_upwards(part: str) -> None:
    found = {}
    for path in modules(part):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        if wrong := violations(path.read_text(encoding="utf-8"), package, LAYERS[part]):
            found[str(path.relative_to(ROOT))] = wrong
    assert not found


@pytest.mark.parametrize("part", LAYERS)
def test_every_layer_exists(part: str) -> None:
    assert list(modules(part)), f"{part} has moved: LAYERS must follow"


@pytest.mark.parametrize(
    "source",
    [
        "import lightning",
        "import lightning.pytorch as pl",
        "from lightning.pytorch import Trainer",
        "def later():\n    from pytorch_lightning import Trainer",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "import torch\ntorch.cuda.current_device()",
        "import lightning_roundpipe",
        "from lightning_roundpipe import RoundPipeStrategy",
        "from lightning_roundpipe.runtime.worker import Worker",
        "from lightning_roundpipe import strategy",
        "from .. import strategy",
        "from ..runtime import worker",
        "from ..strategy import RoundPipeStrategy",
    ],
)
def test_an_upward_import_is_found(source: str) -> None:
    assert violations(source, f"{PACKAGE}.plan", LAYERS["plan"])


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.float32",
        "from lightning_roundpipe.exceptions import PlanError",
        "from lightning_roundpipe.plan.stages import Plan",
        "from .stages import Plan",
        "from . import stages",
        "from ..exceptions import PlanError",
        "import heapq",
    ],
)
def test_a_downward_import_is_allowed(source: str) -> None:
    assert not violations(source, f"{PACKAGE}.plan", LAYERS["plan"])


def test_importing_the_package_does_nothing() -> None:
    """No thread, no CUDA context, no compiler, nothing printed."""
    program = f"""
import sys, threading
import torch, lightning.pytorch
compiler = "torch._inductor.compile_fx" in sys.modules
before = threading.enumerate()
import {PACKAGE}
assert threading.enumerate() == before, threading.enumerate()
assert not torch.cuda.is_initialized()
assert ("torch._inductor.compile_fx" in sys.modules) == compiler
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
