"""The model of the main job: shape, init, the three ways to build and to run it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from infinity.errors import ModelError
from infinity.models import GPT, GPTConfig, parse_spec
from infinity.models.gpt import generate

TINY = GPTConfig(layers=2, heads=2, width=16, context=8, vocab=256)


def build(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def batch(config: GPTConfig = TINY) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocab, (2, config.context + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(config: GPTConfig) -> list[Tensor]:
    model = build(config)
    model(*batch()).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_the_default_has_about_twenty_five_million_parameters() -> None:
    assert 24e6 < GPTConfig().numel < 27e6


@pytest.mark.parametrize("tie_weights", [False, True])
def test_the_number_of_parameters_is_that_of_the_model(tie_weights: bool) -> None:
    config = replace(TINY, tie_weights=tie_weights, vocab=100, layers=3)
    assert config.numel == sum(param.numel() for param in GPT(config).parameters())


def test_the_first_loss_is_that_of_a_guess() -> None:
    assert build()(*batch()).item() == pytest.approx(math.log(256), rel=0.02)


def test_weights_are_normal_and_residual_projections_smaller() -> None:
    model = build(GPTConfig(layers=8, heads=4, width=128))
    block = model.blocks[0]
    assert isinstance(block, nn.Module)
    weights = dict(block.named_parameters())
    assert weights["mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["mlp.down.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["attention.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(weights["norm1.weight"], torch.ones(128))


@pytest.mark.parametrize("tie_weights", [False, True])
def test_a_meta_model_made_real_module_by_module_has_the_same_weights(tie_weights: bool) -> None:
    config = replace(TINY, tie_weights=tie_weights)
    with torch.device("meta"):
        model = GPT(config)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(torch.empty_like(param, device="cpu")))  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build(config).parameters(), strict=True))


def test_tied_weights_are_one_parameter() -> None:
    model = build(replace(TINY, tie_weights=True))
    assert model.head.weight is model.tokens.weight


def test_logits_do_not_depend_on_later_tokens() -> None:
    model, (tokens, _) = build(), batch()
    changed = tokens.clone()
    changed[:, -1] += 1
    changed %= 256
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


@pytest.mark.parametrize("checkpoint", [True, "reentrant"])
def test_recomputation_changes_no_gradient(checkpoint: bool | str) -> None:
    config = replace(TINY, checkpoint=checkpoint)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(gradients(config), gradients(TINY), strict=True))


def test_every_parameter_gets_a_gradient() -> None:
    assert len(gradients(TINY)) == len(list(GPT(TINY).parameters()))


def test_bf16_weights_give_bf16_logits_and_an_fp32_loss() -> None:
    model, (tokens, targets) = build().to(torch.bfloat16), batch()
    assert model(tokens).dtype == torch.bfloat16
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, nn.functional.cross_entropy(model(tokens).float().view(-1, 256), targets.reshape(-1)))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ModelError, match="9 tokens is longer than the model's context of 8"):
        build()(torch.zeros(1, 9, dtype=torch.int64))


def test_generation_is_a_function_of_the_seed() -> None:
    model = build()
    first, same, other = (model.generate(b"def ", 20, generator=seed) for seed in (1, 1, 2))
    assert len(first) == 20
    assert first == same != other


def test_temperature_zero_takes_the_likeliest_byte() -> None:
    model = build()
    token = model(torch.tensor([[100, 101]]))[0, -1].argmax().item()
    assert model.generate(b"de", 1, temperature=0) == bytes([token])


def test_generation_starts_without_a_prompt_and_runs_past_the_context() -> None:
    assert len(build().generate(b"", 20)) == 20


def test_generation_needs_no_bytes_above_a_small_vocabulary() -> None:
    assert max(build(replace(TINY, vocab=10)).generate(b"\1", 20)) < 10


def test_generation_takes_any_callable() -> None:
    def count(tokens: Tensor) -> Tensor:
        return nn.functional.one_hot((tokens + 1) % 256, 256).float()

    assert generate(count, b"a", 3, context=4, temperature=0) == b"bcd"


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is -1"):
        build().generate(b"a", 1, temperature=-1)


def test_a_spec_names_what_differs_from_the_default() -> None:
    assert parse_spec("gpt") == parse_spec("gpt:") == GPTConfig()
    assert parse_spec("gpt:layers=6, width=384,heads=6,tie_weights=true,checkpoint=reentrant") == GPTConfig(
        layers=6, width=384, heads=6, tie_weights=True, checkpoint="reentrant"
    )


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("bert:layers=2", "the only family is 'gpt'"),
        ("gpt:layer=2", "unknown option 'layer'. Did you mean 'layers'"),
        ("gpt:zzz=2", "unknown option 'zzz'. Options: layers"),
        ("gpt:layers", "'layers' is not NAME=VALUE"),
        ("gpt:layers=", "'layers=' is not NAME=VALUE"),
        ("gpt:layers=2,layers=3", "layers is given twice"),
        ("gpt:layers=two", "layers is 'two'"),
        ("gpt:layers=true", "layers is True"),
        ("gpt:layers=0", "layers is 0"),
        ("gpt:tie_weights=1", "tie_weights is 1"),
        ("gpt:checkpoint=sometimes", "checkpoint is 'sometimes'"),
        ("gpt:width=100,heads=3", "width 100 is not a multiple of heads 3"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        parse_spec(spec)


def test_all_wrong_options_of_a_spec_are_listed() -> None:
    with pytest.raises(ModelError, match=r"layer'.*; heads is given twice"):
        parse_spec("gpt:layer=2,heads=2,heads=3")
