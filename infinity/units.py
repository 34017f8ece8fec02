"""Finds the units of a model: the module subtrees whose parameters are gathered and released together.

Each repeated block (child of a ``ModuleList`` or ``Sequential``) is a unit with its whole subtree; every other module that owns
parameters itself is a unit of its own; the user can name more classes and modules. A parameter belongs to the first unit that holds
it, and later units borrow it. Looks at modules only: it knows no memory and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.errors import ModelError, NotYetError
from infinity.layout import ParamSpec, UnitSpec

CONTAINERS = (nn.ModuleList, nn.Sequential)

WHOLE = (nn.MultiheadAttention,)
"""Modules that read their children's parameters themselves: a unit with their subtree, so that torch's fast paths see ordinary ones."""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The layout's word for a dtype: "bf16", "fp32", or torch's own name."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(slots=True)
class FoundUnit:
    """A unit before any memory is given to it. ``owned`` and ``borrowed`` are (name in the model, parameter)."""

    name: str
    path: str
    """Of the module in the model; empty for the model itself."""
    module: nn.Module
    whole: bool
    """Is it the module's whole subtree, or only the parameters that the module owns itself?"""
    owned: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    borrowed: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    def modules(self) -> list[nn.Module]:
        """The modules whose own parameters are the unit's."""
        return list(self.module.modules()) if self.whole else [self.module]

    def spec(self, cast: torch.dtype | None) -> UnitSpec:
        """The owned parameters as plain data; floating ones in dtype ``cast`` where one is given."""
        return UnitSpec(self.name, tuple(_param_spec(name, param, cast) for name, param in self.owned))


def find_units(model: nn.Module, *, classes: Collection[str] = (), names: Collection[str] = ()) -> list[FoundUnit]:
    """The units of ``model`` in registration order; ``classes`` and ``names`` (class names, module paths) are units with their subtree.

    Errors: ModelError when the model has no parameter, or a name in ``names`` is no module of it; NotYetError for compiled modules.
    """
    known = dict(model.named_modules())
    compiled = [name or type(model).__name__ for name, module in known.items() if _is_compiled(module)]
    if compiled:
        raise NotYetError(f"torch.compile is not built yet, and these modules are compiled: {', '.join(compiled)}. Give the plain modules.")
    missing = [name for name in names if name not in known]
    if missing:
        listed = ", ".join(map(repr, missing))
        raise ModelError(f"leaf_module.names: the model has no module {listed}. Give names as in model.named_modules().")
    owners: dict[int, FoundUnit] = {}
    units: list[FoundUnit] = []
    for unit, params in _walk(model, "", set(), frozenset(classes), frozenset(names), repeated=False):
        for name, param in params:
            owner = owners.setdefault(id(param), unit)
            if owner is not unit:
                unit.borrowed.append((name, param))
            elif all(param is not other for _, other in unit.owned):
                unit.owned.append((name, param))
        if unit.path == "" and unit.name in known:
            unit.name += " (the model itself)"  # a child bears the name of the model's class
        if unit.owned or unit.borrowed:
            units.append(unit)
    if not units:
        raise ModelError("the model has no parameters; there is nothing to train or to place.")
    return units


def _walk(
    module: nn.Module, name: str, seen: set[int], classes: frozenset[str], names: frozenset[str], *, repeated: bool
) -> Iterator[tuple[FoundUnit, list[tuple[str, nn.Parameter]]]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    whole = (
        (repeated and not isinstance(module, CONTAINERS))
        or isinstance(module, WHOLE)
        or type(module).__name__ in classes
        or (name in names)
    )
    if whole:
        seen.update(map(id, module.modules()))
        yield FoundUnit(name or type(module).__name__, name, module, True), _named(name, module.named_parameters(remove_duplicate=False))
        return
    own = _named(name, module.named_parameters(recurse=False))
    if own:
        yield FoundUnit(name or type(module).__name__, name, module, False), own
    for child_name, child in module.named_children():
        child_path = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, child_path, seen, classes, names, repeated=isinstance(module, CONTAINERS))


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _named(prefix: str, params: Iterator[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}" if prefix else name, param) for name, param in params]


def _param_spec(name: str, param: nn.Parameter, cast: torch.dtype | None) -> ParamSpec:
    dtype = cast if cast is not None and param.dtype.is_floating_point else param.dtype
    return ParamSpec(name, tuple(param.shape), dtype_name(dtype), dtype.itemsize, param.requires_grad)
