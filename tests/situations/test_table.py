"""The table of situations is complete, and names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERED = [str(row) for row in range(1, 113)]
SMALL = ["A1", "A2", "A3", "A5", "A8", "A9", "B1", "B2", "C1", "C4", "D1", "E1", "F2", "G1"]
STATES = ("right", "refused", "as in plain Lightning", "partly", "not there")


def table() -> dict[str, tuple[str, list[str]]]:
    """State and tests of each row."""
    rows = {}
    for line in (ROOT / "docs/situations.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| row", "| ---")):
            row, _, state, tests = (cell.strip() for cell in line.strip("|").split("|"))
            assert row not in rows, row
            rows[row] = state, re.findall(r"`(tests/\S+?::\w+)`", tests)
    return rows


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_situation_has_a_row() -> None:
    assert list(table()) == NUMBERED + SMALL


def test_states_are_known_and_have_tests() -> None:
    for row, (state, tests) in table().items():
        assert state.startswith(STATES), (row, state)
        assert tests or state.startswith("not there"), row


def test_named_tests_exist() -> None:
    missing = [
        name
        for _, tests in table().values()
        for name in tests
        if name.split("::")[1] not in functions_of(name.split("::")[0])
    ]
    assert not missing
