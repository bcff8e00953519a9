"""The documentation builds without a warning, and what the builder adds is right."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("material")

ROOT = Path(__file__).parents[2]


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", target],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = tmp_path / "site"
    for page in ("contributing", "changelog"):
        assert (site / page / "index.html").is_file()
    assert "lightning_roundpipe.RoundPipeStrategy" in (site / "api/strategy/index.html").read_text(encoding="utf-8")
    for picture in (site / "pictures").iterdir():
        assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert {picture.name for picture in (site / "pictures").iterdir()} >= {"roundpipe.svg", "micro_batches.svg"}


def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](nowhere.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\n", encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


@pytest.fixture
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_root_lead_to_pages(hooks: ModuleType) -> None:
    text = (
        "[a](docs/design.md) [b](docs/design.md#words) [c](CHANGELOG.md) [d](LICENSE) [e](https://x.org/y) [f](#here)"
    )
    assert hooks._links_from_root(text) == (
        "[a](design.md) [b](design.md#words) [c](changelog.md) d [e](https://x.org/y) [f](#here)"
    )
    assert hooks.on_page_markdown("[a](../README.md#x) [b](design.md)") == "[a](../README.md#x) [b](design.md)"
    assert hooks.on_page_markdown("[a](../CHANGELOG.md)") == "[a](changelog.md)"
