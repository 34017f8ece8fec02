"""What the numbers must be, from torch's own integer and elementwise operations. Imports nothing of infinity.

The formulas are written out once more here, from the design and not from the code, so that a mistake in a kernel cannot hide in its
own test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NAN = 0x7FC00000
_INFINITY = 0x7F800000
_SPLIT_MAX = 0x7F7F7FFF


# ---- 16 + 16 bits ----


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (hi, lo), both int16: hi is the bits rounded half away from zero to 16, lo the signed rest."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    magnitude = torch.where((magnitude > _SPLIT_MAX) & (magnitude < _INFINITY), _SPLIT_MAX, magnitude)
    magnitude = torch.where(magnitude > _INFINITY, _NAN, magnitude)
    bits = sign | magnitude
    hi = (bits + 0x8000) >> 16
    lo = bits - (hi << 16)
    return _to_int16(hi), lo.to(torch.int16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """(hi, lo) -> fp32; ``hi`` may be bf16 as well."""
    bits = ((hi.view(torch.int16).to(torch.int64) & 0xFFFF) << 16) + lo.to(torch.int64)
    return _to_int32(bits & 0xFFFFFFFF).view(torch.float32)


def _to_int16(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)


def _to_int32(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


# ---- AdamW ----


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors with one rounding.

    The product of two fp32 numbers is exact in fp64. Their sum with c is rounded to fp64 *to odd*, which makes the second rounding, to
    fp32, right (S. Boldo and G. Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product, c64 = a.double() * b.double(), c.double()
    total = product + c64
    c_part = total - product
    error = (product - (total - c_part)) + (c64 - c_part)  # exact (Knuth's TwoSum)
    is_even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(total, math.inf), error))
    return torch.where(torch.isfinite(total) & (error != 0) & is_even, odd, total).float()


@dataclass(frozen=True)
class AdamWScalars:
    """One parameter group's numbers for one step: computed in double, cast once to fp32 (0-dim tensors)."""

    decay: Tensor
    weight: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    step_scale: Tensor
    bias_scale: Tensor
    eps: Tensor

    @classmethod
    def of(cls, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> AdamWScalars:
        """Of a group at the ``step``-th update (from 1)."""
        beta1, beta2 = betas
        return cls(
            decay=_f32(1 - lr * weight_decay),
            weight=_f32(1 - beta1),
            beta2=_f32(beta2),
            one_minus_beta2=_f32(1 - beta2),
            step_scale=_f32(-lr / (1 - beta1**step)),
            bias_scale=_f32(math.sqrt(1 - beta2**step)),
            eps=_f32(eps),
        )


def _f32(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64).float()


def adamw(p: Tensor, m: Tensor, v: Tensor, g: Tensor, s: AdamWScalars, grad_factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 parameter and moments after one update by ``g`` (fp32 or bf16); a computed NaN is 7FC00000."""
    g = g.float()
    if grad_factor != 1.0:
        g = g * _f32(grad_factor)
    w = s.weight.expand_as(g)
    m = fma(w, g - m, m) if abs(s.weight.item()) < 0.5 else fma(w - 1, g - m, g)
    v = fma(s.one_minus_beta2 * g, g, s.beta2 * v)
    denominator = _sqrt(v) / s.bias_scale + s.eps
    p = p * s.decay + (s.step_scale * m) / denominator
    return _canonical(p), _canonical(m), _canonical(v)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded: torch.sqrt on the CPU may be MKL's, which is off by one ulp for one number in six."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


def _canonical(x: Tensor) -> Tensor:
    nan = torch.tensor(_NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(torch.isnan(x), nan, x)


class ReferenceAdamW:
    """The whole optimizer on ordinary tensors: bf16 parameters keep an fp32 master, the rest are fp32.

    ``param_groups`` is a list of dicts as torch's, read at each step. A parameter without gradient is left alone, step count included.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        given = list(params)
        groups = [dict(item) for item in given if isinstance(item, Mapping)] or [{"params": given}]
        self.param_groups: list[dict[str, Any]] = [{**defaults, **group, "params": list(group["params"])} for group in groups]
        self.state: dict[Tensor, dict[str, Any]] = {}

    def step(self, grad_factor: float = 1.0) -> None:
        """One update by each parameter's ``.grad`` times ``grad_factor``."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group, grad_factor)

    def update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any], grad_factor: float = 1.0) -> None:
        """One update of one parameter."""
        state = self.state.get(param) or self._first_state(param)
        state["step"] += 1
        scalars = AdamWScalars.of(
            lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"], step=state["step"]
        )
        data = param.detach()
        master = data if param.dtype == torch.float32 else join(data, state["residual"])
        master, state["exp_avg"], state["exp_avg_sq"] = adamw(master, state["exp_avg"], state["exp_avg_sq"], grad, scalars, grad_factor)
        if param.dtype == torch.float32:
            data.copy_(master)
        else:
            hi, state["residual"] = split(master)
            data.view(torch.int16).copy_(hi)

    def _first_state(self, param: Tensor) -> dict[str, Any]:
        if param.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"no reference for {param.dtype}")
        zeros = torch.zeros(param.shape, dtype=torch.float32)
        state: dict[str, Any] = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros}
        if param.dtype == torch.bfloat16:
            state["residual"] = torch.zeros(param.shape, dtype=torch.int16)
        self.state[param] = state
        return state


# ---- norm and clipping ----


def run_sums(grad: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """fp64 sums of squares over runs of 1,024 elements: lane i of 8 adds the elements i mod 8 in order, then the lanes pairwise."""
    flat = grad.detach().reshape(-1).float().numpy().astype(np.float64)
    padded = np.zeros(-(-flat.size // 1024) * 1024)
    padded[: flat.size] = flat
    squares = np.square(padded).reshape(-1, 128, 8)
    lanes = np.zeros((squares.shape[0], 8))
    for row in range(128):
        lanes = lanes + squares[:, row]
    a = lanes.T
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))


def grad_norm(grads: Sequence[Tensor | None]) -> float:
    """The global norm: runs, then parameters, then their sum in registration order, each summed exactly (math.fsum)."""
    return math.sqrt(math.fsum(math.fsum(run_sums(grad)) for grad in grads if grad is not None))


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) in double, cast once to fp32; NaN stays NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else float(np.float32(factor))
