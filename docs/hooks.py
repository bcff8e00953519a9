"""What mkdocs does beside its own work here: pages from the root of the repository, and pictures drawn by the package.

Pictures are drawn when the pages are built, never kept: they show what the code does now.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
"""Files of the repository's root, and the pages that stand for them."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages and pictures."""
    for source, page in FROM_ROOT.items():
        if source != "README.md":  # The site has an overview of its own.
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=_links_from_root(text)))
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import pictures
    finally:
        sys.path.remove(str(ROOT / "docs"))
    with tempfile.TemporaryDirectory() as folder:
        for path in pictures.draw_all(Path(folder)):
            files.append(File.generated(config, f"pictures/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ that work in the repository lead to the pages that stand for those files."""
    for source, page in FROM_ROOT.items():
        markdown = markdown.replace(f"](../{source})", f"]({page})")
    return markdown


def _links_from_root(text: str) -> str:
    """Links of a file in the root, as its page must have them; what has no page is left as text."""
    text = text.replace("](docs/", "](")
    for source, page in FROM_ROOT.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w/-]+\.md)[^)]*\)", r"\1", text)
