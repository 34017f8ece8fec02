"""What happens when a parameter is touched whose memory may not be here: never a read of freed memory.

A parameter wears ``ReleasedParameter`` whenever no forward of its unit runs. Metadata answer at once; inside a forward, or a backward,
the unit is gathered; outside both, operations that return an alias are refused and all others gather for that one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import EngineClosedError, ReleasedParameterError

if TYPE_CHECKING:
    from infinity.flat_param import FlatParam, Unit

METADATA = frozenset(
    {
        "shape",
        "size",
        "dim",
        "ndim",
        "ndimension",
        "stride",
        "numel",
        "nelement",
        "nbytes",
        "itemsize",
        "element_size",
        "dtype",
        "device",
        "layout",
        "name",
        "names",
        "requires_grad",
        "requires_grad_",
        "grad_fn",
        "_version",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "is_mps",
        "is_xla",
        "is_xpu",
        "is_vulkan",
        "is_ipu",
        "is_maia",
        "is_mtia",
        "is_hpu",
        "is_inference",
        "is_complex",
        "is_floating_point",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_contiguous",
        "is_pinned",
        "is_shared",
        "get_device",
        "storage_offset",
        "retains_grad",
        "output_nr",
        "__len__",
        "__hash__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "set:_backward_hooks",
        "set:_post_accumulate_grad_hooks",
        "set:requires_grad",
        "is_set_to",
        "_is_view",
        "type_as",
        "__dlpack_device__",
        "volatile",
        "has_names",
    }
)
"""Read without the memory; written as functions are named, "set:" before attributes that are assigned."""

ALIASES = frozenset(
    {
        "data",
        "data_ptr",
        "numpy",
        "__array__",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "__dlpack__",
        "share_memory_",
        "set_",
        "set:data",
        "__deepcopy__",
        "__reduce_ex__",
        "detach_",
    }
)
"""Hand out the memory itself, in a form that cannot be looked at afterwards."""


class ReleasedParameter(nn.Parameter):
    """A parameter outside every forward of its unit."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in METADATA:
            return _call(func, args, kwargs)
        owners = [owner for param in _released(args, kwargs) if (owner := owner_of(param)) is not None]
        if not owners:
            return _call(func, args, kwargs)
        if name in ("grad", "set:grad", "del:grad"):
            door, unit, flat, index = owners[0]
            if name == "grad":
                return door.read_grad(unit, flat, index)
            door.write_grad(unit, flat, index, args[1] if name == "set:grad" else None)
            return None
        result = refused = None
        begun: list[tuple[Door, Any]] = []
        try:
            for door in {id(owner[0]): owner[0] for owner in owners}.values():
                begun.append((door, door.begin_operation([owner[1:] for owner in owners if owner[0] is door], name)))
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        finally:
            given = {id(arg) for arg in (*args, *kwargs.values())}
            with torch._C.DisableTorchFunctionSubclass():
                for door, operation in reversed(begun):
                    refused = door.end_operation(operation, given, result) or refused
        if refused is not None:
            del result  # an alias: who looks at the variables of a traceback would touch it
            refuse_alias([refused], name)
        return result


class Door:
    """What the subclass asks of an engine; ``touch.py`` answers."""

    def read_grad(self, unit: Unit, flat: FlatParam, index: int) -> torch.Tensor | None:
        """``param.grad``"""
        raise EngineClosedError("this engine has not been opened.")

    def write_grad(self, unit: Unit, flat: FlatParam, index: int, grad: torch.Tensor | None) -> None:
        """``param.grad = grad``"""
        raise EngineClosedError("this engine has not been opened.")

    def begin_operation(self, touched: list[tuple[Unit, FlatParam, int]], name: str) -> Any:
        """Operation ``name`` will read or write these parameters: their memory is there when this returns. What ``end_operation`` takes."""

    def end_operation(self, operation: Any, given: set[int], result: Any) -> str | None:
        """It has run and gave ``result``, or raised (None); ``given`` are the ids of its arguments.

        Whose memory the result would hand out, if that must not be; nothing but the name, so that no traceback holds the alias.
        """
        return None


_OWNERS: dict[int, tuple[weakref.ref[Door], weakref.ref[Unit], weakref.ref[FlatParam], int]] = {}
"""id of a parameter -> its engine's door, and where it is; filled at start and emptied at close, or when the engine is collected."""


def register(door: Door, param: nn.Parameter, unit: Unit, flat: FlatParam, index: int) -> None:
    """Makes ``door`` answer for ``param``. Memory: keeps nothing alive."""
    key = id(param)

    def forget(gone: weakref.ref[Door]) -> None:
        if key in _OWNERS and _OWNERS[key][0] is gone:
            del _OWNERS[key]

    _OWNERS[key] = weakref.ref(door, forget), weakref.ref(unit), weakref.ref(flat), index


def unregister(params: Iterable[nn.Parameter]) -> None:
    """Nobody answers for ``params`` any more; they are ordinary again."""
    for param in params:
        _OWNERS.pop(id(param), None)
        param.__class__ = nn.Parameter


def owner_of(param: torch.Tensor) -> tuple[Door, Unit, FlatParam, int] | None:
    """Who manages ``param``, if anybody does."""
    owner = _OWNERS.get(id(param))
    if owner is None:
        return None
    door, unit, flat = owner[0](), owner[1](), owner[2]()
    return None if door is None or unit is None or flat is None else (door, unit, flat, owner[3])


def refuse_alias(names: list[str], operation: str) -> None:
    """Raises for an operation that would hand out memory that comes and goes."""
    raise ReleasedParameterError(
        f"{operation!r} would return memory of parameter {', '.join(names)} that is not there between forwards. "
        "Read inside `with infinity.gathered(params):`, or take copies from `engine.state_dict()`."
    )


def _name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute: str = getattr(getattr(func, "__self__", None), "__name__", "")
        return {"__get__": "", "__set__": "set:", "__delete__": "del:"}[name] + attribute
    return name


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _released(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ReleasedParameter]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, ReleasedParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _released(tuple(value), {})
        elif isinstance(value, dict):
            yield from _released(tuple(value.values()), {})
