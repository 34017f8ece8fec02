"""A GPT over bytes: plain torch, the model of the main job and of `--model gpt:...`.

It knows nothing of infinity but its errors. Every module that owns parameters has ``reset_parameters``, and calling those in the order
of ``modules()`` draws the same weights as building the model does; so it may be built under ``torch.device("meta")`` and made real
module by module.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infinity.errors import ModelError

INIT_STD = 0.02

Checkpoint = bool | Literal["reentrant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; the default has about 25 million parameters.

    Errors: ModelError lists every value that cannot be.
    """

    layers: int = 8
    heads: int = 8
    width: int = 512
    context: int = 256
    """Longest sequence, in tokens."""
    vocab: int = 256
    tie_weights: bool = False
    """One weight for the token embedding and the head."""
    checkpoint: Checkpoint = False
    """Recompute each block in backward; "reentrant" takes the older of torch's two ways."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("layers", "heads", "width", "context", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(f"{name} is {value!r}: it must be a whole number of at least 1")
        if not isinstance(self.tie_weights, bool):
            problems.append(f"tie_weights is {self.tie_weights!r}: it must be true or false")
        if not isinstance(self.checkpoint, bool) and self.checkpoint != "reentrant":
            problems.append(f"checkpoint is {self.checkpoint!r}: it must be true, false or 'reentrant'")
        if not problems and self.width % self.heads:
            multiple = max(self.width // self.heads, 1) * self.heads
            problems.append(f"width {self.width} is not a multiple of heads {self.heads}; width {multiple} is")
        if problems:
            raise ModelError("gpt: " + "; ".join(problems))

    @property
    def numel(self) -> int:
        """Parameters, a tied weight counted once."""
        block = 12 * self.width**2 + 4 * self.width
        embeddings = self.vocab + self.context + (0 if self.tie_weights else self.vocab)
        return self.layers * block + (embeddings + 2) * self.width


def parse_spec(spec: str) -> GPTConfig:
    """``"gpt"`` or ``"gpt:layers=6,width=512,checkpoint=reentrant"`` -> GPTConfig; what is not named has its default.

    Errors: ModelError lists everything wrong with the spec.
    """
    family, _, options = spec.strip().partition(":")
    if family.strip() != "gpt":
        raise ModelError(f"model {spec!r}: the only family is 'gpt'. Write for example 'gpt:layers=8,width=512'.")
    known = [config_field.name for config_field in fields(GPTConfig)]
    values: dict[str, int | bool | str] = {}
    problems = []
    for option in filter(None, (part.strip() for part in options.split(","))):
        name, equals, text = (part.strip() for part in option.partition("="))
        if not equals or not text:
            problems.append(f"{option!r} is not NAME=VALUE")
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"unknown option {name!r}. {f'Did you mean {near[0]!r}?' if near else 'Options: ' + ', '.join(known)}")
        elif name in values:
            problems.append(f"{name} is given twice")
        else:
            values[name] = _parse_value(text)
    if problems:
        raise ModelError(f"model {spec!r}: " + "; ".join(problems))
    return GPTConfig(**values)  # type: ignore[arg-type]  # GPTConfig checks the types of its values


def _parse_value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


class Linear(nn.Linear):
    """Without a bias; weights drawn from normal(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # before nn.Linear, which draws the weights
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=self.std)


class TiedLinear(nn.Module):
    """A linear map whose weight another module owns and draws."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def reset_parameters(self) -> None:
        """Nothing: the owner of the weight draws it."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (..., in) -> (..., out)."""
        return F.linear(x, self.weight)


class Embedding(nn.Embedding):
    """Weights drawn from normal(0, INIT_STD)."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, time, width), kept."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


class MLP(nn.Module):
    """Four times wider inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, time, width), kept."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention, then MLP, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, time, width), kept."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """The whole model: tokens to logits, or to the loss where targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab, config.width)
        self.positions = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = TiedLinear(self.tokens.weight) if config.tie_weights else Linear(config.width, config.vocab)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits in the weights' dtype; with ``targets`` the mean cross entropy in nats, over fp32 logits.

        Shape: tokens and targets (batch, time), int64 -> logits (batch, time, vocab), or a scalar.
        Errors: ModelError where time exceeds the context.
        """
        time = tokens.shape[1]
        if time > self.config.context:
            raise ModelError(f"a sequence of {time} tokens is longer than the model's context of {self.config.context}")
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        recompute = self.config.checkpoint and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:  # nothing in a block is random
                x = checkpoint(block, x, use_reentrant=self.config.checkpoint == "reentrant", preserve_rng_state=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def generate(self, prompt: bytes, n: int, *, temperature: float = 1.0, generator: torch.Generator | int = 0) -> bytes:
        """``n`` bytes that continue ``prompt``; see :func:`generate`."""
        return generate(
            self, prompt, n, context=self.config.context, device=self.tokens.weight.device, temperature=temperature, generator=generator
        )


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: bytes,
    n: int,
    *,
    context: int,
    device: torch.device | str = "cpu",
    temperature: float = 1.0,
    generator: torch.Generator | int = 0,
) -> bytes:
    """``n`` bytes that continue ``prompt`` (a line break where it is empty), drawn from ``model``'s logits.

    The draw is made on the CPU with ``generator``, a CPU generator or a seed; temperature 0 takes the likeliest byte.
    Shape: model maps (1, time) to (1, time, vocab); of more than 256 tokens only the first 256 are bytes.
    """
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be 0 or more")
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    text = bytearray(prompt or b"\n")
    begin = len(text)
    with torch.no_grad():
        for _ in range(n):
            tokens = torch.tensor([list(text[-context:])], dtype=torch.int64, device=device)
            logits = model(tokens)[0, -1, :256].float().cpu()
            if temperature == 0:
                text.append(int(logits.argmax()))
            else:
                text.append(int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)))
    return bytes(text[begin:])


def _residual_std(config: GPTConfig) -> float:
    """Of the projections onto the residual stream, so that its variance does not grow with depth. Source: GPT-2."""
    return INIT_STD / math.sqrt(2 * config.layers)
