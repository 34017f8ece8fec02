"""What the engine asks of an optimizer: the planes it stores, the scalars of a step, and the arguments of its native kernel.

Not a ``torch.optim.Optimizer``: it holds no parameter and no state. State rests in pages, groups are the engine's, and the arithmetic is
one native kernel over a tile. Knows no page, no file and no tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, SupportsFloat

from infinity.kernel_args import Kernel, Segment
from infinity.layout import PlaneSpec


class Optimizer(ABC):
    """One update rule. Immutable; what varies by parameter group or step is given to each call."""

    name: ClassVar[str]
    """As the config's ``optimizer.type`` says it, in lower case."""
    kernel: ClassVar[Kernel]
    """The kernel that takes what ``pack`` gives."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self.validate_group(defaults)
        self.defaults: dict[str, Any] = dict(defaults)

    @abstractmethod
    def planes(self, dtype: str) -> tuple[PlaneSpec, ...]:
        """What it stores for a trained parameter of dtype "bf16" or "fp32", in order; the parameter itself is not among it."""

    @abstractmethod
    def validate_group(self, group: Mapping[str, Any]) -> None:
        """Nothing if the group can be used; keys that this optimizer does not know are the user's.

        Errors: ValueError that names the hyper-parameter, its value and what is allowed.
        """

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> bytes:
        """What a kernel needs of ``group`` for the ``step``-th update of a parameter (counted from 1).

        Gradients are multiplied by ``grad_factor`` first. The same for every parameter of the group with that step count.
        """

    @abstractmethod
    def pack(self, param: int, residual: int, states: Sequence[Sequence[int]], piece_numel: int, segments: Sequence[Segment]) -> bytes:
        """Arguments of ``kernel`` for one tile, from addresses.

        ``residual`` is 0 for fp32. ``states`` are the planes of ``planes()`` in that order, each a list of its pages in the tile;
        ``piece_numel`` is how many elements one such page holds.
        """


def number_in_range(group: Mapping[str, Any], key: str, allowed: Callable[[float], bool], allowed_text: str) -> float:
    """``group[key]`` as a float.

    Errors: ValueError that names key, value and ``allowed_text`` unless it is a finite number for which ``allowed`` holds.
    """
    if key not in group:
        raise ValueError(f"{key} is missing from a parameter group: it must be {allowed_text}")
    return check_number(key, group[key], allowed, allowed_text)


def check_number(name: str, value: object, allowed: Callable[[float], bool], allowed_text: str) -> float:
    """``value`` as a float; a one-element tensor is a number too.

    Errors: ValueError that names it and ``allowed_text`` unless it is a finite number for which ``allowed`` holds.
    """
    number = value if type(value) is float else _as_float(value)
    if not (math.isfinite(number) and allowed(number)):
        raise ValueError(f"invalid {name}: {value!r}; it must be {allowed_text}")
    return number


def _as_float(value: object) -> float:
    """NaN for what is not one number."""
    if isinstance(value, (bool, str)) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or tensor of several elements
        return math.nan
