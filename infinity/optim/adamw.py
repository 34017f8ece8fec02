"""AdamW with decoupled weight decay: torch's ``AdamW(fused=True)``, bit for bit in fp32.

Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, 2019; the order of operations is in
``native/kernels/adamw.cpp``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from infinity.kernel_args import Kernel, Segment, pack_adamw
from infinity.layout import PlaneSpec
from infinity.optim.base import Optimizer, check_number, number_in_range

_SCALARS = struct.Struct("=8f")

_UNSUPPORTED = ("amsgrad", "maximize")


class AdamW(Optimizer):
    """Two fp32 moments per parameter, whatever its dtype."""

    name: ClassVar[str] = "adamw"
    kernel: ClassVar[Kernel] = Kernel.ADAMW

    def __init__(
        self, *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__({"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def planes(self, dtype: str) -> tuple[PlaneSpec, ...]:
        """``exp_avg`` and ``exp_avg_sq``, four bytes each."""
        return PlaneSpec("exp_avg", 4), PlaneSpec("exp_avg_sq", 4)

    def validate_group(self, group: Mapping[str, Any]) -> None:
        """As torch.optim.AdamW does; amsgrad and maximize are not built."""
        _hyper_parameters(group)
        for key in _UNSUPPORTED:
            if group.get(key):
                raise ValueError(f"invalid {key}: {group[key]!r}; it must be False, infinity's AdamW does not have it yet")

    def scalars(self, group: Mapping[str, Any], step: int, grad_factor: float) -> bytes:
        """``inf_adamw_scalars``: computed in double, each cast once to fp32."""
        if step < 1:
            raise ValueError(f"invalid step: {step}; steps are counted from 1")
        lr, beta1, beta2, eps, weight_decay = _hyper_parameters(group)
        return _pack_scalars(
            grad_factor,
            1.0 - lr * weight_decay,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            -lr / (1.0 - beta1**step),
            math.sqrt(1.0 - beta2**step),
            eps,
        )

    def pack(self, param: int, residual: int, states: Sequence[Sequence[int]], piece_numel: int, segments: Sequence[Segment]) -> bytes:
        """``inf_adamw_args`` and its segments."""
        exp_avg, exp_avg_sq = states
        return pack_adamw(param, residual, exp_avg, exp_avg_sq, piece_numel, segments)


def _hyper_parameters(group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    """lr, beta1, beta2, eps, weight_decay."""
    lr = number_in_range(group, "lr", _is_not_negative, "a finite number >= 0")
    betas = group.get("betas")
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ValueError(f"invalid betas: {betas!r}; it must be two numbers, each in [0, 1)")
    beta1 = check_number("betas[0]", betas[0], _is_below_one, "a number in [0, 1)")
    beta2 = check_number("betas[1]", betas[1], _is_below_one, "a number in [0, 1)")
    eps = number_in_range(group, "eps", _is_not_negative, "a finite number >= 0")
    weight_decay = number_in_range(group, "weight_decay", _is_not_negative, "a finite number >= 0")
    return lr, beta1, beta2, eps, weight_decay


def _is_not_negative(x: float) -> bool:
    return x >= 0.0


def _is_below_one(x: float) -> bool:
    return 0.0 <= x < 1.0


def _pack_scalars(*scalars: float) -> bytes:
    try:
        return _SCALARS.pack(*scalars)
    except OverflowError:  # beyond fp32: the cast of C gives an infinity, struct refuses
        return _SCALARS.pack(*(_to_fp32_range(x) for x in scalars))


def _to_fp32_range(x: float) -> float:
    try:
        struct.pack("=f", x)
    except OverflowError:
        return math.copysign(math.inf, x)
    return x
