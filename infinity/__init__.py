"""Infinity: train models whose parameters, gradients and optimizer state do not fit in memory, exactly.

``infinity.Engine`` and ``infinity.initialize`` are the doors; the names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from infinity import errors as errors
    from infinity import io as io
    from infinity.api import (
        clip_grad_norm_,
        gathered,
        initialize,
        read_plane,
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )
    from infinity.engine import Engine

_FROM = {
    "Engine": "infinity.engine",
    "clip_grad_norm_": "infinity.api",
    "gathered": "infinity.api",
    "initialize": "infinity.api",
    "read_plane": "infinity.api",
    "safe_get_full_fp32_param": "infinity.api",
    "safe_get_full_grad": "infinity.api",
    "safe_get_full_optimizer_state": "infinity.api",
}

__all__ = [
    "Engine",
    "clip_grad_norm_",
    "errors",
    "gathered",
    "initialize",
    "io",
    "read_plane",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "io"):
        return import_module(f"infinity.{name}")
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    raise AttributeError(f"module 'infinity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
