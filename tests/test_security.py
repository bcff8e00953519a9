"""What docs/security.md says: no network, no other programs, no pickles, checkpoints that are only weights."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.exceptions import PlanError
from tests.helpers.equivalence import train
from tests.helpers.models import Residual, residual_batches, seeded

ROOT = Path(__file__).parents[1]
BANNED_MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess", "socket", "ssl", "http", "urllib", "ftplib",
    "requests", "aiohttp", "ctypes", "runpy", "multiprocessing",
}  # fmt: skip
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.spawnv", "torch.load",
    "yaml.load", "torch.hub.load",
}  # fmt: skip
IMPORTS_BY_NAME = {"arguments.py": "loss_weight", "chunked_loss.py": "liger"}


def found_in(tree: ast.AST) -> Iterator[str]:
    """Names of banned modules and calls in ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in BANNED_MODULES:
            if any(not alias.name.endswith("Error") for alias in node.names):
                yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS:
            # What may be loaded besides tensors is for the caller to say, in so many words.
            said = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
            if not (said and ast.unparse(node.func) == "torch.load" and ast.unparse(said[0]) != "False"):
                yield ast.unparse(node.func)


@pytest.mark.parametrize("path", sorted((ROOT / "lightning_roundpipe").rglob("*.py")), ids=lambda path: path.name)
def test_source(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not list(found_in(ast.parse(source)))
    if "import_module" in source:
        assert IMPORTS_BY_NAME[path.name] in source


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from http.client import HTTPConnection", "os.system('ls')", "exec(x)", "torch.load(path)",
     "torch.load(path, weights_only=False)"],
)  # fmt: skip
def test_what_is_banned_is_found(line: str) -> None:
    assert list(found_in(ast.parse(line)))


PROGRAM = """
import sys
events = []
sys.addaudithook(lambda event, args: events.append((event, args)) if event in {
    "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
} else None)
import lightning as L
import torch
from lightning_roundpipe import RoundPipeStrategy
from tests.helpers.equivalence import BatchDealer, train
from tests.helpers.models import Residual, residual_batches, seeded
from unittest import mock
before = len(events)
with mock.patch("lightning.fabric.utilities.rank_zero.rank_zero_info"):
    result = train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
result.trainer.save_checkpoint("weights.ckpt")
result.trainer.predict(result.module, BatchDealer(residual_batches(num=1)))
assert events[before:] == [], events[before:]
print("quiet")
"""


def test_a_fit_opens_no_connection_and_starts_no_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("quiet"), done.stderr


def test_checkpoints_are_only_weights(tmp_path: Path) -> None:
    whole = train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2, max_epochs=2)
    half = train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2)
    half.trainer.save_checkpoint(path := tmp_path / "half.ckpt")
    assert torch.load(path, weights_only=True)["roundpipe"].keys() == {"base_seed"}
    resumed = train(
        lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(num_microbatches=2), 2,
        max_epochs=2, ckpt_path=str(path),
    )  # fmt: skip
    for name, tensor in whole.state.items():
        assert torch.equal(resumed.state[name], tensor), name


def test_a_plan_is_data(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"__reduce__": ["os.system", ["true"]]}), encoding="utf-8")
    with pytest.raises(PlanError):
        train(lambda: seeded(Residual), residual_batches(), RoundPipeStrategy(plan=path), 2)
