"""AdamW as the engine sees it: planes, checks of a group, scalars."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from infinity.kernel_args import Kernel, Segment, pack_adamw
from infinity.layout import PlaneSpec
from infinity.optim.adamw import AdamW
from tests.support import reference

GROUP: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def unpacked(packed: bytes) -> tuple[float, ...]:
    return struct.unpack("=8f", packed)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adamw_stores_two_fp32_moments(dtype: str) -> None:
    assert AdamW().planes(dtype) == (PlaneSpec("exp_avg", 4), PlaneSpec("exp_avg_sq", 4))


def test_the_defaults_are_those_of_torch() -> None:
    torch_defaults = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert AdamW().defaults == {key: torch_defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}


def test_betas_given_as_a_list_are_kept_as_a_tuple() -> None:
    assert AdamW(betas=[0.8, 0.9]).defaults["betas"] == (0.8, 0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 2, 17, 100_000])
def test_the_scalars_are_computed_in_double_and_cast_once(step: int) -> None:
    wanted = (
        0.25,
        1 - 3e-4 * 0.1,
        1 - 0.9,
        0.95,
        1 - 0.95,
        -(3e-4 / (1 - 0.9**step)),
        math.sqrt(1 - 0.95**step),
        1e-8,
    )
    assert unpacked(AdamW().scalars(GROUP, step, 0.25)) == tuple(float(np.float32(x)) for x in wanted)


def test_a_learning_rate_of_zero_is_allowed() -> None:
    assert unpacked(AdamW().scalars({**GROUP, "lr": 0}, 1, 1.0))[1] == 1.0


def test_a_learning_rate_may_be_a_tensor() -> None:
    assert AdamW().scalars({**GROUP, "lr": torch.tensor(0.5)}, 3, 1.0) == AdamW().scalars({**GROUP, "lr": 0.5}, 3, 1.0)


def test_a_factor_that_is_not_finite_is_passed_on() -> None:
    assert math.isnan(unpacked(AdamW().scalars(GROUP, 1, math.nan))[0])
    assert unpacked(AdamW().scalars(GROUP, 1, math.inf))[0] == math.inf


def test_a_scalar_beyond_fp32_becomes_an_infinity_as_a_cast_in_c_does() -> None:
    scalars = unpacked(AdamW().scalars({**GROUP, "lr": 1e39}, 1, 1.0))
    assert scalars[5] == -math.inf
    assert scalars[2] == float(np.float32(1 - 0.9))


def test_a_step_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid step: 0"):
        AdamW().scalars(GROUP, 0, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", -1e-3, r"invalid lr: -0\.001; it must be a finite number >= 0"),
        ("lr", math.nan, r"invalid lr: nan"),
        ("lr", math.inf, r"invalid lr: inf"),
        ("lr", "1e-3", r"invalid lr: '1e-3'"),
        ("lr", True, r"invalid lr: True"),
        ("lr", None, r"invalid lr: None"),
        ("lr", torch.zeros(2), r"invalid lr: tensor"),
        ("betas", (1.0, 0.9), r"invalid betas\[0\]: 1\.0; it must be a number in \[0, 1\)"),
        ("betas", (0.9, -0.1), r"invalid betas\[1\]: -0\.1"),
        ("betas", (0.9,), r"invalid betas: \(0\.9,\); it must be two numbers"),
        ("betas", 0.9, r"invalid betas: 0\.9"),
        ("betas", None, r"invalid betas: None"),
        ("eps", -1e-8, r"invalid eps: -1e-08"),
        ("weight_decay", -0.1, r"invalid weight_decay: -0\.1"),
        ("amsgrad", True, r"invalid amsgrad: True; it must be False"),
        ("maximize", True, r"invalid maximize: True; it must be False"),
    ],
)
def test_a_group_that_cannot_be_used_is_refused_by_key_and_value(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW().validate_group({**GROUP, key: value})


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_a_group_that_lacks_a_hyper_parameter_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        AdamW().validate_group({name: value for name, value in GROUP.items() if name != key})


def test_keys_of_torch_and_of_the_user_are_left_alone() -> None:
    AdamW().validate_group({**GROUP, "params": [], "initial_lr": 1, "amsgrad": False, "foreach": None, "fused": True, "mine": object()})


def test_a_wrong_default_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="invalid lr"):
        AdamW(lr=-1.0)


def test_pack_gives_the_arguments_of_its_kernel() -> None:
    segments = [Segment(1 << 40, 0, 10, True, AdamW().scalars(GROUP, 1, 1.0))]
    assert AdamW.kernel is Kernel.ADAMW
    assert AdamW().pack(1, 2, [[3, 4], [5, 6]], 7, segments) == pack_adamw(1, 2, [3, 4], [5, 6], 7, segments)


# ---- the reference itself ----


def rounded_to_fp32(x: Fraction) -> float:
    """Nearest fp32, ties to even, by exact comparison of neighbours."""
    guess = np.float32(float(x))
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - x), int(c.view(np.uint32)) & 1)))


def test_the_reference_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
    # sums that lie close to the middle of two fp32 numbers, where rounding twice goes wrong: c is half a unit in the last place of a * b
    product = (a.astype(np.float64) * b).astype(np.float32)
    c = np.where(rng.random(3000) < 0.5, np.spacing(product) * np.float32(0.5), -product * np.float32(2.0) ** rng.integers(-3, 30, 3000))
    c = c.astype(np.float32)
    found = reference.fma(*(torch.from_numpy(x) for x in (a, b, c))).numpy()
    wanted = [rounded_to_fp32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)]
    assert found.tolist() == wanted


def test_the_reference_factor_is_one_below_the_limit_and_nan_for_nan() -> None:
    assert reference.clip_factor(0.5, 1.0) == 1.0
    assert reference.clip_factor(4.0, 1.0) == float(np.float32(1 / (4.0 + 1e-6)))
    assert math.isnan(reference.clip_factor(math.nan, 1.0))
    assert reference.clip_factor(math.inf, 1.0) == 0.0
