"""The AdamW kernel against torch.optim.AdamW(fused=True)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infinity.kernel_args import Kernel, Segment, Simd, pack_adamw
from infinity.optim.adamw import AdamW
from tests.support import reference
from tests.support.kernels import run_well

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.3, 0.999), (0.5, 0.5), (0.0, 0.9), (0.95, 0.0)]


class Ours:
    """One fp32 parameter and its moments, updated by the kernel."""

    def __init__(self, param: torch.Tensor, variant: Simd = Simd.AUTO) -> None:
        self.param = param.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
        self.variant = variant

    def update(self, grad: torch.Tensor, scalars: bytes) -> None:
        numel = self.param.numel()
        planes = (self.param.data_ptr(), 0, [self.exp_avg.data_ptr()], [self.exp_avg_sq.data_ptr()], numel)
        run_well(Kernel.ADAMW, pack_adamw(*planes, [Segment(grad.data_ptr(), 0, numel, False, scalars)], self.variant))


def of_torch(param: torch.Tensor, **group: object) -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
    weight = torch.nn.Parameter(param.clone())
    return weight, torch.optim.AdamW([weight], fused=True, **group)  # type: ignore[arg-type]


def grad_at(step: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    size = 10.0 ** torch.randint(-6, 2, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * size


@pytest.mark.parametrize("variant", [Simd.SCALAR, Simd.AUTO])
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_in_fp32_equal_torch_bit_for_bit(variant: Simd, betas: tuple[float, float], weight_decay: float) -> None:
    numel = 16 * 125
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    weight, optimizer = of_torch(start, lr=1e-3, betas=betas, weight_decay=weight_decay)
    ours = Ours(start, variant)
    for step in range(1, 51):
        grad = grad_at(step, numel)
        lr = 1e-3 * min(1.0, step / 10)
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = grad.clone()
        optimizer.step()
        ours.update(grad, AdamW().scalars({"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}, step, 1.0))
        state = optimizer.state[weight]
        assert torch.equal(ours.param, weight.data)
        assert torch.equal(ours.exp_avg, state["exp_avg"])
        assert torch.equal(ours.exp_avg_sq, state["exp_avg_sq"])


@pytest.mark.parametrize("numel", [1, 7, 15, 17, 100, 1003])
def test_sizes_that_are_not_multiples_of_16_are_within_one_ulp_of_torch(numel: int) -> None:
    start = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    weight, optimizer = of_torch(start, lr=1e-2, weight_decay=0.1)
    ours = Ours(start)
    for step in range(1, 21):
        grad = grad_at(step, numel)
        weight.grad = grad.clone()
        optimizer.step()
        ours.update(grad, AdamW(lr=1e-2, weight_decay=0.1).scalars({**AdamW().defaults, "lr": 1e-2, "weight_decay": 0.1}, step, 1.0))
        state = optimizer.state[weight]
        for mine, theirs in ((ours.param, weight.data), (ours.exp_avg, state["exp_avg"]), (ours.exp_avg_sq, state["exp_avg_sq"])):
            one_ulp = np.spacing(np.maximum(np.abs(mine.numpy()), np.abs(theirs.numpy())))
            assert (np.abs(mine.numpy() - theirs.numpy()) <= one_ulp).all()
            mine.copy_(theirs)  # each step starts from the same numbers


def test_the_reference_in_fp32_equals_torch_bit_for_bit() -> None:
    start = torch.randn(1600, generator=torch.Generator().manual_seed(0))
    weight, optimizer = of_torch(start, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    mine = start.clone()
    reference_optimizer = reference.ReferenceAdamW([mine], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        weight.grad = grad_at(step, 1600)
        mine.grad = weight.grad.clone()
        optimizer.step()
        reference_optimizer.step()
        assert torch.equal(mine, weight.data)


def test_gradients_times_a_factor_equal_torch_given_the_product() -> None:
    start = torch.randn(1600, generator=torch.Generator().manual_seed(0))
    weight, optimizer = of_torch(start)
    ours = Ours(start)
    for step in range(1, 11):
        grad = grad_at(step, 1600)
        factor = reference.clip_factor(reference.grad_norm([grad]), 1.0)
        weight.grad = grad * torch.tensor(factor)
        optimizer.step()
        ours.update(grad, AdamW().scalars(AdamW().defaults, step, factor))
        assert torch.equal(ours.param, weight.data)


def test_the_norm_is_that_of_torch_but_for_rounding() -> None:
    grads = [grad_at(step, 1000 * (step + 1) + step) for step in range(4)]
    assert reference.grad_norm(grads) == pytest.approx(float(torch.cat(grads).double().norm()), rel=1e-12)
