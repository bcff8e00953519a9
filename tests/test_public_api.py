"""What users may rely on: the public names, what every module exports, and that it is documented and typed."""

import ast
import importlib
import inspect
import pkgutil
import re
from importlib import metadata
from pathlib import Path

import pytest

import lightning_roundpipe
from lightning_roundpipe import exceptions

PACKAGE = lightning_roundpipe.__name__
ROOT = Path(lightning_roundpipe.__file__).parent
MODULES = [PACKAGE, *(info.name for info in pkgutil.walk_packages(lightning_roundpipe.__path__, f"{PACKAGE}."))]


def test_public_names() -> None:
    assert set(lightning_roundpipe.__all__) >= {"RoundPipePrecision", "RoundPipeStrategy", "__version__"}
    assert len(lightning_roundpipe.__all__) <= 12, "a name too many is a promise too many"


def test_version_is_that_of_the_distribution() -> None:
    assert lightning_roundpipe.__version__ == metadata.version("lightning-roundpipe")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev|post)\d+)*", lightning_roundpipe.__version__)


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "py.typed").is_file()


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for_and_exports_what_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and module.__doc__.strip()
    source = Path(str(module.__file__))
    if source.name in ("__init__.py", "__main__.py") and not hasattr(module, "__all__"):
        assert not [node for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
        return
    exported = module.__all__
    assert all(hasattr(module, export) for export in exported)
    assert len(set(exported)) == len(exported)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_exported_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    for export in getattr(module, "__all__", ()):
        thing = getattr(module, export)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{export}"


@pytest.mark.parametrize("name", exceptions.__all__)
def test_every_error_is_one_of_ours(name: str) -> None:
    error = getattr(exceptions, name)
    assert issubclass(error, exceptions.RoundPipeError)
    assert not issubclass(exceptions.RoundPipeError, RuntimeError | ValueError)


def test_errors_can_be_caught_as_what_they_are_to_python() -> None:
    assert issubclass(exceptions.PlanError, ValueError)
    assert issubclass(exceptions.BatchSplitError, ValueError)
    assert issubclass(exceptions.UnsupportedUseError, RuntimeError)
    assert issubclass(exceptions.RoundPipeInternalError, RuntimeError)


@pytest.mark.parametrize("name", ["RoundPipeStrategy", "RoundPipePrecision"])
def test_every_argument_is_documented(name: str) -> None:
    thing = getattr(lightning_roundpipe, name)
    documentation = inspect.getdoc(thing)
    assert documentation is not None
    for argument in inspect.signature(thing.__init__).parameters:
        if argument != "self":
            assert re.search(rf"^    {argument}: ", documentation, re.MULTILINE), argument
