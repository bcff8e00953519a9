"""What pages name exists: options of commands, arguments of the strategy, messages by which to look up a remedy."""

import ast
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FROM_LIGHTNING = {"accelerator", "checkpoint_io", "precision_plugin"}
ARGUMENTS = inspect.signature(RoundPipeStrategy).parameters


def inline_code(page: Path) -> Iterator[str]:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from (re.sub(r"\s+", " ", match) for match in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))


@pytest.fixture(scope="module")
def known_options() -> dict[str, str]:
    """The help of every command."""
    texts = {}
    for command in ("simulate", "plan", "doctor", "export"):
        written = io.StringIO()
        with pytest.raises(SystemExit), redirect_stdout(written):
            main([command, "--help"])
        texts[command] = written.getvalue()
    return texts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_a_sentence_have_the_options_they_are_given(page: Path, known_options: dict[str, str]) -> None:
    for code in inline_code(page):
        words = code.split()
        if words[0] != "lightning-roundpipe" or len(words) == 1:
            continue
        assert words[1] in known_options, code
        for option in re.findall(r"--[\w-]+", code):
            assert re.search(rf"{option}\b", known_options[words[1]]), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_arguments_of_the_strategy_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for call in re.findall(r"RoundPipeStrategy\(([^()]*)\)", text):
        assert set(re.findall(r"(\w+)\s*=", call)) <= ARGUMENTS.keys(), call


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_classes_in_yaml_exist_and_take_their_arguments(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for described in _with_class_path(yaml.safe_load(block)):
            module, _, name = described["class_path"].rpartition(".")
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            assert set(described.get("init_args", {})) <= parameters.keys(), described


def _with_class_path(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "class_path" in node:
            yield node
        for child in node.values():
            yield from _with_class_path(child)
    elif isinstance(node, list):
        for child in node:
            yield from _with_class_path(child)


def test_readme_has_a_row_for_every_argument() -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition("## Arguments of `RoundPipeStrategy`")[2]
    rows = re.findall(
        r"^\| `(\w+)` \| `([^`]+)` \|", section.partition("\n## ")[0].partition("\n### ")[0], re.MULTILINE
    )
    defaults = {name: each.default for name, each in ARGUMENTS.items() if name not in FROM_LIGHTNING}
    assert len(rows) == len(defaults)
    assert {name: ast.literal_eval(default) for name, default in rows} == defaults


def messages() -> list[str]:
    """Every string of the package's source but docstrings, with `...` where a value is put in."""
    found = []
    for path in (ROOT / "lightning_roundpipe").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_symptoms_are_what_the_package_says() -> None:
    """Messages are in double backticks in the first column of the tables of the page."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^\| ``(.+?)``", text, re.MULTILINE)
    assert len(symptoms) > 5
    said = messages()
    assert [symptom for symptom in symptoms if not any(symptom in message for message in said)] == []
