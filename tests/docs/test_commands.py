"""Every command and Python example of README, CONTRIBUTING and docs/ runs here, or is listed with the reason why not.

Commands run in an empty folder with a small `config.json`; what a command of a page writes is there for the next one.
Examples are given arguments that make them tiny, and GPUs are replaced by virtual workers.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe.cli import main
from lightning_roundpipe.plan.devices import PROFILES, save_profile

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    # Shell, by the beginning of the command.
    "pip install": "needs an index; the Makefile's `venv`, on which CI runs, installs the package and its extras",
    "lightning-roundpipe doctor --output": "needs a GPU; tests/gpu/test_doctor.py runs it",
    "torchrun": "for two machines; tests/strategy/test_machines.py has some on one host",
    "srun": "for two machines under SLURM",
    "MASTER_ADDR=": "for two machines",
    # Python, by the first line.
    "trainer = L.Trainer(num_nodes=2": "for two machines",
    'trainer = L.Trainer(strategy="ddp"': "the other side of a comparison, for several processes",
    "from lightning.pytorch.strategies import FSDPStrategy": "the other side of a comparison, for GPUs",
    "from lightning.pytorch.strategies import DeepSpeedStrategy": "the other side of a comparison, needs deepspeed",
}

TINY_ARGUMENTS = {
    "examples/cli.py": ["--trainer.fast_dev_run=2"],
    "examples/finetune_causal_lm.py": [
        *("--steps=2", "--batch-size=4", "--sequence-length=32", "--hidden-size=32", "--layers=2", "--sample-bytes=1")
    ],
    "examples/language_model_cli.py": [*("--trainer.max_steps=2", "--data.sequence_length=32", "--data.batch_size=4")],
    "examples/train_language_model.py": ["--steps=2", "--sequence-length=32", "--batch-size=4"],
    "examples/vit_digits.py": ["--epochs=1", "--steps=2"],
    "docs/pictures.py": [],
}


class Block(NamedTuple):
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3]))
        for match in found
        if match[2] == language
    ]


def commands(page: Path) -> Iterator[str]:
    for block in blocks(page, "bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            command = re.sub(r"\s+# .*$", "", line).strip()
            if command and not command.startswith("#"):
                yield re.sub(r"\s+", " ", command)


def reason_not_to_run(text: str) -> str | None:
    return next((reason for beginning, reason in NOT_RUN.items() if text.startswith(beginning)), None)


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n```bash\none --x \\\n  --y  # why\n# no\ntwo\n```\n=== x\n\n    ```python\n    a\n    ```\n")
    assert list(commands(page)) == ["one --x --y", "two"]
    assert [(block.line, block.code) for block in blocks(page, "python")] == [(11, "a\n")]


@pytest.mark.parametrize("beginning", NOT_RUN)
def test_what_is_not_run_is_still_there(beginning: str) -> None:
    texts = [command for page in PAGES for command in commands(page)]
    texts += [block.code for page in PAGES for block in blocks(page, "python")]
    assert any(text.startswith(beginning) for text in texts)


PAGES_WITH_COMMANDS = [page for page in PAGES if any(reason_not_to_run(c) is None for c in commands(page))]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Lightning's advice on runs as short as these.
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_model(tmp_path / "config.json")
    save_profile(PROFILES["rtx-4090"], tmp_path / "gpu.json")
    for folder in ("examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for command in dict.fromkeys(commands(page)):
        if reason_not_to_run(command) is None:
            _run(shlex.split(command), monkeypatch)


def _run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    match words:
        case ["lightning-roundpipe", *arguments]:
            if arguments[0] == "doctor":
                monkeypatch.setattr("lightning_roundpipe.doctor.host_bytes_per_s", lambda _: 1e11)
                monkeypatch.setattr("lightning_roundpipe.doctor.adamw_weights_per_s", lambda _: 1e9)
            assert main(arguments) == 0, words
        case ["python", "-c", program]:
            subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=100)
        case ["python", script, *arguments]:
            tiny = TINY_ARGUMENTS[script]
            given = ["cpu" if word == "gpu" else word for word in arguments]
            monkeypatch.setattr(sys, "argv", [script, *given, *tiny])
            monkeypatch.syspath_prepend(ROOT / Path(script).parent)
            runpy.run_path(script, run_name="__main__")
        case ["make", *arguments]:
            # What the targets run is run by the tests of the examples, and by CI: here only that they exist.
            done = subprocess.run(
                [shutil.which("make") or "make", "-n", "-C", str(ROOT), *arguments],
                check=False,
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.returncode == 0, done.stderr
        case _:
            pytest.fail(f"nobody runs {shlex.join(words)}: teach this test, or list the command with a reason")


PAGES_WITH_PYTHON = [page for page in PAGES if any(reason_not_to_run(b.code) is None for b in blocks(page, "python"))]


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Lightning's advice on runs as short as these.
@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, in one namespace."""
    quiet = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer
    monkeypatch.setattr(L, "Trainer", lambda **given: trainer(**{**quiet, **given}))
    names = _names()
    for block in blocks(page, "python"):
        if reason_not_to_run(block.code) is None:
            code = block.code.replace('accelerator="gpu"', 'accelerator="cpu"')
            exec(compile(code, block.name, "exec"), names)


def test_what_the_example_schedule_prints_is_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "CONTRIBUTING.md"
    (block,) = blocks(page, "python")
    exec(compile(block.code, block.name, "exec"), {"__name__": "page"})
    times = re.findall(r"(\d+) ms", capsys.readouterr().out)
    assert len(times) == 2
    assert f"It prints {times[0]} ms for round-robin and {times[1]} ms for the other" in page.read_text("utf-8")


def _names() -> dict[str, Any]:
    """What pages take for granted: a model, data, the usual imports."""
    from lightning_roundpipe import RoundPipeStrategy

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            (inputs,) = batch
            return self.layers(inputs).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = partial(DataLoader, batch_size=4)
    return {
        "__name__": "page",
        "L": L,
        "torch": torch,
        "RoundPipeStrategy": RoundPipeStrategy,
        "model": Model(),
        "datamodule": loader(TensorDataset(torch.randn(8, 4))),
        "token_batches": loader(TensorDataset(torch.randint(0, 100, (8, 12)))),
    }


def _write_model(path: Path) -> None:
    from transformers import Qwen3Config

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(path.parent)
