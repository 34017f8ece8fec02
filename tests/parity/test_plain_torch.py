"""Training with everything on NVMe equals ordinary training: fp32 bit for bit ``torch.optim.AdamW(fused=True)``, bf16 the reference.

Both budgets are the least that the engine takes, so every unit and every page moves.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.support import models, reference, runs

both_precisions = pytest.mark.parametrize("precision", ["fp32", "bf16"])
both_overlaps = pytest.mark.parametrize("overlap", ["deferred", "fused"])
both_checkpoints = pytest.mark.parametrize("checkpoint", ["reentrant", "non_reentrant"])


def make(precision: str, **options: Any) -> nn.Module:
    return models.build(lambda: models.GPT(**options), runs.DTYPES[precision])


def check(
    directory: Path,
    *,
    precision: str,
    overlap: str,
    steps: int = 6,
    accumulation: int = 1,
    clip: float = 0.0,
    skips: Sequence[Sequence[int]] = ((),),
    **options: Any,
) -> tuple[runs.Outcome, runs.Outcome]:
    """Trains twice and compares; gives both outcomes, plain torch's first."""
    batches = models.token_batches(steps * accumulation, skips=skips)
    build = functools.partial(make, precision, **options)
    plain = runs.train(runs.PlainTrainer(build(), accumulation=accumulation, clip=clip), batches)
    config = runs.engine_config(directory, precision=precision, overlap=overlap, accumulation=accumulation, clip=clip)
    config = runs.with_device(config, runs.least_device_bytes(build, config))
    config = runs.with_host(config, runs.least_host_bytes(build, config))
    found = runs.engine_run(build(), config, batches, read_gradients=overlap == "deferred")
    runs.assert_same(plain, found)
    return plain, found


@both_overlaps
@both_precisions
def test_twenty_steps_of_a_gpt_on_nvme_equal_plain_torch(tmp_path: Path, precision: str, overlap: str) -> None:
    plain, _ = check(tmp_path, precision=precision, overlap=overlap, steps=20)
    assert plain.losses[-1] < plain.losses[0]


@both_overlaps
@both_precisions
@pytest.mark.parametrize("accumulation", [2, 3])
def test_gradient_accumulation_is_exact(tmp_path: Path, precision: str, overlap: str, accumulation: int) -> None:
    check(tmp_path, precision=precision, overlap=overlap, accumulation=accumulation)


@both_precisions
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_multiplies_by_the_factor_of_the_exact_norm(tmp_path: Path, precision: str, accumulation: int) -> None:
    plain, found = check(tmp_path, precision=precision, overlap="deferred", clip=0.5, accumulation=accumulation)
    assert found.norms == plain.norms
    assert all(norm is not None and norm > 0.5 for norm in plain.norms)


@both_precisions
def test_a_norm_below_the_limit_clips_nothing(tmp_path: Path, precision: str) -> None:
    plain, found = check(tmp_path, precision=precision, overlap="deferred", clip=1e6)
    assert found.norms == plain.norms


@both_overlaps
def test_the_norm_without_clipping_is_the_exact_one(tmp_path: Path, overlap: str) -> None:
    plain, found = check(tmp_path, precision="bf16", overlap=overlap)
    assert found.norms == plain.norms


def test_the_clip_factor_is_torchs_but_for_the_last_bits() -> None:
    model = make("fp32")
    model(*models.token_batches(1)[0]).backward()
    ours = reference.clip_factor(reference.grad_norm([param.grad for param in model.parameters()]), 0.5)
    torchs = 0.5 / (torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() + 1e-6)
    assert ours < 1.0
    assert ours == pytest.approx(torchs, rel=1e-6)


@both_overlaps
@both_precisions
def test_a_block_that_is_unused_in_some_steps_is_left_alone_in_them(tmp_path: Path, precision: str, overlap: str) -> None:
    check(tmp_path, precision=precision, overlap="auto" if overlap == "fused" else overlap, skips=((), (1,), (1, 2), ()), steps=8)


@both_overlaps
@both_precisions
def test_a_block_that_is_never_used_keeps_its_weights_and_zero_moments(tmp_path: Path, precision: str, overlap: str) -> None:
    check(tmp_path, precision=precision, overlap=overlap, skips=((2,),))


@both_precisions
def test_a_block_used_in_one_micro_step_of_two_gets_that_gradient(tmp_path: Path, precision: str) -> None:
    check(tmp_path, precision=precision, overlap="fused", accumulation=2, skips=((), (1,)))


@both_overlaps
@both_precisions
def test_tied_weights_get_the_sum_of_both_gradients(tmp_path: Path, precision: str, overlap: str) -> None:
    _, found = check(tmp_path, precision=precision, overlap=overlap, tied=True)
    assert "head.weight" not in found.exp_avg


@both_overlaps
@both_precisions
@pytest.mark.parametrize("frozen", [(1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_frozen_blocks_stay_as_they_are(tmp_path: Path, precision: str, overlap: str, frozen: tuple[int, ...]) -> None:
    _, found = check(tmp_path, precision=precision, overlap=overlap, frozen_blocks=frozen)
    for index in frozen:
        assert torch.equal(found.weights[f"blocks.{index}.up.weight"], make(precision).get_parameter(f"blocks.{index}.up.weight"))


@both_overlaps
@both_checkpoints
@both_precisions
def test_checkpoints_around_blocks(tmp_path: Path, precision: str, checkpoint: models.Checkpoint, overlap: str) -> None:
    check(tmp_path, precision=precision, overlap=overlap, checkpoint=checkpoint)


@both_overlaps
@both_checkpoints
@both_precisions
def test_checkpoints_around_several_blocks(tmp_path: Path, precision: str, checkpoint: models.Checkpoint, overlap: str) -> None:
    check(tmp_path, precision=precision, overlap=overlap, checkpoint=checkpoint, around="several")


@both_overlaps
@both_checkpoints
@both_precisions
def test_checkpoints_inside_a_forward(tmp_path: Path, precision: str, checkpoint: models.Checkpoint, overlap: str) -> None:
    check(tmp_path, precision=precision, overlap=overlap, checkpoint=checkpoint, around="inside")


@both_overlaps
def test_a_frozen_block_recomputed_inside_its_forward_is_let_go_when_its_node_has_ended(tmp_path: Path, overlap: str) -> None:
    check(tmp_path, precision="fp32", overlap=overlap, checkpoint="reentrant", around="inside", frozen_blocks=(2, 3))


@both_checkpoints
def test_everything_at_once(tmp_path: Path, checkpoint: models.Checkpoint) -> None:
    plain, found = check(
        tmp_path, precision="bf16", overlap="deferred", accumulation=2, clip=0.5, tied=True, frozen_blocks=(1,), checkpoint=checkpoint,
        around="several", skips=((), (3,), ()),
    )  # fmt: skip
    assert found.norms == plain.norms


def test_dropout_draws_the_same_numbers(tmp_path: Path) -> None:
    batches = models.token_batches(4)
    build = functools.partial(make, "fp32", dropout=0.3, checkpoint="non_reentrant")
    torch.manual_seed(5)
    plain = runs.train(runs.PlainTrainer(build()), batches)
    after = torch.get_rng_state()
    config = runs.engine_config(tmp_path)
    with runs.EngineTrainer(build(), config) as trainer:
        torch.manual_seed(5)
        runs.assert_same(plain, runs.train(trainer, batches))
    assert torch.equal(torch.get_rng_state(), after)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none and another rate for the rest, and one group that is empty."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.2},
        {"params": []},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.5, 0.7)},
    ]


@both_overlaps
@both_precisions
def test_parameter_groups_and_their_schedules(tmp_path: Path, precision: str, overlap: str) -> None:
    batches = models.token_batches(6)
    config = runs.engine_config(tmp_path, precision=precision, overlap=overlap)

    def run(trainer: Any) -> runs.Outcome:
        for step, args in enumerate(batches):
            trainer.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            trainer.optimizer.param_groups[2]["weight_decay"] = 0.01 * step
            trainer.backward(trainer(*args))
            trainer.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    plain = run(runs.PlainTrainer(make(precision), groups=two_groups))
    with runs.EngineTrainer(make(precision), config, groups=two_groups) as trainer:
        runs.assert_same(plain, run(trainer))
        assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [len(g["params"]) for g in two_groups(trainer.model)]


def test_a_torch_scheduler_drives_the_rate(tmp_path: Path) -> None:
    batches = models.token_batches(6)

    def run(trainer: Any) -> runs.Outcome:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=2e-2, total_steps=6)
        for args in batches:
            trainer.backward(trainer(*args))
            trainer.step()
            scheduler.step()
        outcome: runs.Outcome = trainer.outcome()
        return outcome

    plain = run(runs.PlainTrainer(make("fp32")))
    with runs.EngineTrainer(make("fp32"), runs.engine_config(tmp_path)) as trainer:
        runs.assert_same(plain, run(trainer))


@pytest.mark.parametrize("betas", [(0.3, 0.5), (0.9, 0.999), (0.0, 0.0), (0.5, 0.5)], ids=str)
def test_other_betas(tmp_path: Path, betas: tuple[float, float]) -> None:
    batches = models.token_batches(4)
    plain = runs.train(runs.PlainTrainer(make("fp32", blocks=2), betas=betas), batches)
    config = runs.engine_config(tmp_path, betas=betas)
    runs.assert_same(plain, runs.engine_run(make("fp32", blocks=2), config, batches))


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support import models, runs
torch.set_num_threads(1)
model = models.build(models.GPT, torch.bfloat16)
found = runs.engine_run(model, runs.engine_config(Path(sys.argv[2]), precision="bf16"), models.token_batches(4))
torch.save({"losses": found.losses, "weights": found.weights}, sys.argv[3])
"""


def test_python_without_asserts_computes_the_same(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    saved = tmp_path / "outcome.pt"
    done = subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM, str(root), str(tmp_path), str(saved)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(saved)
    plain = runs.train(runs.PlainTrainer(make("bf16")), models.token_batches(4))
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, found["losses"], strict=True))
    assert all(torch.equal(value, found["weights"][name]) for name, value in plain.weights.items())


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance of two fp32 tensors, counted in floating-point numbers."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.detach().contiguous().view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


def test_odd_sizes_stay_within_one_ulp_of_torch_from_the_same_state(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    model = models.build(models.OddSizes)
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, overlap="deferred")) as trainer:
        for step in range(8):
            trainer.backward(trainer(torch.randn(4, 7, generator=generator)))
            params, torchs = list(trainer.params.values()), []
            for param in params:
                weight = infinity.safe_get_full_fp32_param(param).requires_grad_()
                weight.grad = infinity.safe_get_full_grad(param).float()
                states[weight] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": infinity.safe_get_full_optimizer_state(param, "exp_avg"),
                    "exp_avg_sq": infinity.safe_get_full_optimizer_state(param, "exp_avg_sq"),
                }
                torchs.append(weight)
            optimizer = torch.optim.AdamW(torchs, fused=True, **runs.HYPER)
            optimizer.state.update({weight: states[weight] for weight in torchs})
            optimizer.step()
            trainer.step()
            for name, param, weight in zip(trainer.params, params, torchs, strict=True):
                assert ulps(infinity.safe_get_full_fp32_param(param), weight) <= 1, name
                for moment in ("exp_avg", "exp_avg_sq"):
                    assert ulps(infinity.safe_get_full_optimizer_state(param, moment), optimizer.state[weight][moment]) <= 1, (name, moment)


@both_overlaps
def test_odd_sizes_in_bf16_equal_the_reference(tmp_path: Path, overlap: str) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(4, 7, generator=generator).bfloat16(),) for _ in range(6)]
    plain = runs.train(runs.PlainTrainer(models.build(models.OddSizes, torch.bfloat16)), batches)
    config = runs.engine_config(tmp_path, precision="bf16", overlap=overlap)
    runs.assert_same(plain, runs.engine_run(models.build(models.OddSizes, torch.bfloat16), config, batches))


def test_a_model_given_in_fp32_keeps_its_weights_as_the_masters_of_bf16(tmp_path: Path) -> None:
    model, given = make("fp32", blocks=1, frozen_blocks=(0,)), make("fp32", blocks=1)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, precision="bf16")) as trainer:
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        for name, param in trainer.params.items():
            assert torch.equal(infinity.safe_get_full_fp32_param(param), given.get_parameter(name)), name
        for name, weight in trainer.engine.state_dict().items():
            if name.startswith("blocks.0."):
                assert torch.equal(weight, given.get_parameter(name).bfloat16()), name


def test_the_master_of_a_bf16_weight_is_weight_and_residual_joined(tmp_path: Path) -> None:
    model = make("bf16", blocks=1)
    with runs.EngineTrainer(model, runs.engine_config(tmp_path, precision="bf16")) as trainer:
        runs.train(trainer, models.token_batches(2))
        for param in trainer.params.values():
            joined = reference.join(infinity.read_plane(param, "param").view(torch.int16), infinity.read_plane(param, "residual"))
            assert torch.equal(infinity.safe_get_full_fp32_param(param).view(-1), joined.view(-1))
