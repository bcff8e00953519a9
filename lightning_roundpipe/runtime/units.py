"""Units: the modules that are streamed, found by structure.

No architecture is known by name. The items of repeated block lists are units, then the smallest modules that own the
remaining parameters. What no unit owns (a loose parameter of a container) is looked up when user code asks for it.
"""

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Unit", "find_units", "tensor_bytes"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of ``tensor``."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, eq=False)
class Unit:
    """One module that is streamed as a whole, with all the parameters and buffers below it.

    Attributes:
        index: place among the units, in the order in which the module tree lists them.
        name: dotted path of the module below the root.
        module: the module itself; never copied, never moved.
    """

    index: int
    name: str
    module: nn.Module

    def __str__(self) -> str:
        return f"`{self.name or type(self.module).__name__}`"

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters below the module, each once."""
        return tuple(self.module.parameters())

    @cached_property
    def submodules(self) -> tuple[nn.Module, ...]:
        """The module and all below it."""
        return tuple(self.module.modules())

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(map(tensor_bytes, self.parameters))


def find_units(root: nn.Module, units: str | Sequence[str] = "auto") -> tuple[Unit, ...]:
    """Cut ``root`` into units.

    Args:
        root: the model; its parameters may lie anywhere below it.
        units: ``"auto"``, or class names and dotted paths of modules that must be units. The parameters which these do
            not cover are cut as with ``"auto"``.

    Returns:
        Units of which none holds another, in module order. What two units share belongs to both.

    Raises:
        ValueError: a name matches no module with parameters, or one unit would hold another.
    """
    wanted = _named_modules(root, units) if units != "auto" else {}
    found = list(_visit(root, "", wanted))
    return tuple(Unit(index, name, module) for index, (name, module) in enumerate(found))


def _named_modules(root: nn.Module, units: str | Sequence[str]) -> dict[int, str]:
    names = [units] if isinstance(units, str) else list(units)
    wanted: dict[int, str] = {}
    candidates = [
        (path, module) for path, module in root.named_modules(remove_duplicate=False) if _has_parameters(module)
    ]
    for name in names:
        matches = [(path, module) for path, module in candidates if name in (path, type(module).__name__)]
        if not matches:
            known = {path for path, _ in candidates} | {type(module).__name__ for _, module in candidates}
            close = difflib.get_close_matches(name, sorted(known), n=3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ValueError(
                f"`units` must name module classes or dotted paths of modules with parameters, but {name!r} matches"
                f" none in {type(root).__name__}.{hint}"
            )
        wanted |= {id(module): path for path, module in matches}
    for path, module in candidates:
        if id(module) not in wanted:
            continue
        for inner_path, inner in module.named_modules(prefix=path):
            if inner is not module and id(inner) in wanted:
                raise ValueError(
                    f"Units must not overlap, but `units` selects both {path!r} and {inner_path!r} inside it. Name only"
                    " one of the two levels."
                )
    return wanted


def _visit(
    module: nn.Module, name: str, wanted: dict[int, str], seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or not _has_parameters(module):
        return
    seen.add(id(module))
    holds_wanted = any(id(inner) in wanted for inner in module.modules() if inner is not module)
    if id(module) in wanted or (name and not holds_wanted and _is_atomic(module)):
        seen.update(map(id, module.modules()))
        yield name, module
        return
    blocks = _repeated_blocks(module)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        child_holds_wanted = any(id(inner) in wanted for inner in child.modules())
        if type(child) in blocks and id(child) not in seen and not child_holds_wanted:
            seen.update(map(id, child.modules()))
            if _has_parameters(child):
                yield path, child
        else:
            yield from _visit(child, path, wanted, seen)


def _repeated_blocks(module: nn.Module) -> set[type[nn.Module]]:
    """The classes of which ``module``, if it is a list of modules, holds blocks."""
    if not isinstance(module, _CONTAINERS):
        return set()
    children = [child for child in module.children() if _has_parameters(child)]
    counts = Counter(type(child) for child in children if not isinstance(child, _CONTAINERS))
    if isinstance(module, nn.ModuleList) and len(children) == 1:
        # A model with a single layer; but not a list that holds a whole model.
        return {cls for cls in counts if not any(map(_repeated_blocks, children[0].modules()))}
    return {cls for cls, count in counts.items() if count > 1}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_atomic(module: nn.Module) -> bool:
    """Whether ``module`` is a smallest module that owns parameters.

    It is when all its parameters are its own, when it is one of torch's own layers (which read their children's
    parameters without calling them), and when it computes its parameters (`torch.nn.utils.parametrize`).
    """
    computed = getattr(module, "parametrizations", None) if parametrize.is_parametrized(module) else None
    own = computed is not None or any(parameter is not None for parameter in module._parameters.values())
    leaf = not any(_has_parameters(child) for child in module.children() if child is not computed)
    return own and (leaf or parametrize.type_before_parametrizations(module).__module__.startswith("torch.nn."))
