"""Units: the modules that are streamed, found by structure.

No architecture is known by name. The items of repeated block lists are units, then the smallest modules that own the
remaining parameters. A block that is too large to be streamed at once (many experts) is cut into its parts.
What no unit owns (a loose parameter of a container) is looked up when user code asks for it.
"""

import difflib
import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Unit", "find_units", "tensor_bytes"]

_WORTH_CUTTING = 0.8
"""A large block is cut if its largest piece has no larger share of it. A guess: every cut is one more call."""

_NOT_CALLED = nn.Module.forward
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
        on_call: whether its weights are uploaded when it is called, not along with its stage.
    """

    index: int
    name: str
    module: nn.Module
    on_call: bool = False

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
        return _num_bytes(self.module)


def find_units(
    root: nn.Module,
    units: str | Sequence[str] = "auto",
    max_bytes: float = math.inf,
    on_call: Sequence[str] = (),
) -> tuple[Unit, ...]:
    """Cut ``root`` into units.

    Args:
        root: the model; its parameters may lie anywhere below it.
        units: ``"auto"``, or class names and dotted paths of modules that must be units. The parameters which these do
            not cover are cut as with ``"auto"``.
        max_bytes: a block whose parameters are larger is cut into its parts, where those are notably smaller; what was
            named is not.
        on_call: class names of units whose weights are uploaded when they are called only.

    Returns:
        Units of which none holds another, in module order. What two units share belongs to both.

    Raises:
        ValueError: a name matches no module with parameters (in ``on_call``: no unit), or one unit would hold another.
    """
    wanted = _named_modules(root, units) if units != "auto" else {}
    found = list(_Search(wanted, max_bytes).visit(root, ""))
    classes = {type(module).__name__ for _, module in found}
    if missing := [name for name in on_call if name not in classes]:
        raise ValueError(
            f"`upload_on_call` must name classes of units, but no unit is a {missing[0]}; there are"
            f" {', '.join(sorted(classes))}. Name it in `units`, too, to make units of such modules."
        )
    return tuple(
        Unit(index, name, module, type(module).__name__ in on_call) for index, (name, module) in enumerate(found)
    )


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


@dataclass
class _Search:
    """One search for units.

    Attributes:
        wanted: modules that were named, by id.
        max_bytes: a block with more is cut into its parts.
        seen: modules that are settled.
    """

    wanted: Container[int]
    max_bytes: float
    seen: set[int] = field(default_factory=set)

    def visit(self, module: nn.Module, name: str, *, in_block: bool = False) -> Iterator[tuple[str, nn.Module]]:
        """The units in ``module``, with their names.

        Args:
            module: see there.
            name: its own.
            in_block: whether it is part of a block that is too large to be a unit: what can be called in it then is
                one.
        """
        if id(module) in self.seen or not _has_parameters(module):
            return
        self.seen.add(id(module))
        if id(module) in self.wanted or (name and not self._holds_wanted(module) and _is_atomic(module)):
            yield self._take(module, name)
            return
        blocks = _repeated_blocks(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_block = type(child) in blocks
            whole = is_block or (in_block and type(child).forward is not _NOT_CALLED)
            fits = self._fits(child)
            named = id(child) in self.wanted or self._holds_wanted(child)
            if whole and fits and id(child) not in self.seen and not named:
                taken = self._take(child, path)
                if _has_parameters(child):
                    yield taken
            else:
                yield from self.visit(child, path, in_block=in_block or (is_block and not fits))

    def _fits(self, module: nn.Module) -> bool:
        """Whether ``module`` is to stay whole: it is small enough, or its parts would hardly be smaller."""
        num_bytes = _num_bytes(module)
        if num_bytes <= self.max_bytes:
            return True
        largest = max(sum(map(tensor_bytes, part.parameters(recurse=False))) for part in module.modules())
        return largest > _WORTH_CUTTING * num_bytes

    def _take(self, module: nn.Module, name: str) -> tuple[str, nn.Module]:
        self.seen.update(map(id, module.modules()))
        return name, module

    def _holds_wanted(self, module: nn.Module) -> bool:
        return any(id(inner) in self.wanted for inner in module.modules() if inner is not module)


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


def _num_bytes(module: nn.Module) -> int:
    return sum(map(tensor_bytes, module.parameters()))


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
