"""Infinity: train models whose parameters, gradients and optimizer state do not fit in memory, exactly.

The public names only. Each is looked up when it is first used, so that ``import infinity`` loads neither torch nor the native module.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "InfinityError": "infinity.errors",
}

__all__ = ["InfinityError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
