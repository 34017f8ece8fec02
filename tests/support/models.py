"""Small models of plain torch, one option per feature that parity is about. Imports nothing of infinity."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Checkpoint = Literal["none", "reentrant", "non_reentrant"]
Around = Literal["block", "several", "inside"]

VOCAB = 32
CONTEXT = 8


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and MLP; with ``inside``, the MLP is recomputed by a checkpoint that the block's own forward makes."""

    def __init__(self, width: int, heads: int, inside: Checkpoint = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + recompute(self._mlp, x, self.inside)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def recompute(function: Callable[[Tensor], Tensor], x: Tensor, how: Checkpoint) -> Tensor:
    """``function(x)``, inside an activation checkpoint unless ``how`` is "none"."""
    if how == "none" or not torch.is_grad_enabled():
        return function(x)
    return checkpoint(function, x, use_reentrant=how == "reentrant")


class GPT(nn.Module):
    """Tokens and targets to the loss. Every parameter's numel is a multiple of 16 where ``width`` is one."""

    def __init__(
        self,
        *,
        width: int = 16,
        heads: int = 2,
        blocks: int = 4,
        tied: bool = False,
        frozen_blocks: Collection[int] = (),
        checkpoint: Checkpoint = "none",
        around: Around = "block",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.around = around
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(CONTEXT, width)
        inside: Checkpoint = checkpoint if around == "inside" else "none"
        self.blocks = nn.ModuleList(Block(width, heads, inside, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for index in frozen_blocks:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor, skip: Collection[int] = ()) -> Tensor:
        """The mean cross entropy in fp32; blocks in ``skip`` are left out."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        used = [block for index, block in enumerate(self.blocks) if index not in skip]
        if self.around == "several":
            for first in range(0, len(used), 2):
                x = recompute(nn.Sequential(*used[first : first + 2]), x, self.checkpoint)
        else:
            for block in used:
                x = recompute(block, x, self.checkpoint if self.around == "block" else "none")
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class OddSizes(nn.Module):
    """Parameters of 1, 5, 7, 35, 1,023 and 1,025 elements, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.long = nn.Parameter(torch.randn(1023) / 32)
        self.longer = nn.Parameter(torch.randn(1025) / 32)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (batch, 7) -> scalar."""
        hidden = torch.tanh(self.first(x)) * self.scale
        wide = torch.sin(self.long * hidden.sum()).sum() + torch.cos(self.longer * hidden.mean()).mean()
        return (self.last(hidden).square().mean() + wide / 1024).float()


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The model that ``make`` gives, the same for the same seed; the global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(dtype)


class Tokens(NamedTuple):
    """Arguments of one forward of ``GPT``."""

    tokens: Tensor
    targets: Tensor
    skip: frozenset[int] = frozenset()


def token_batches(n: int, *, batch: int = 2, seed: int = 1, skips: Sequence[Collection[int]] = ((),)) -> list[Tokens]:
    """``n`` micro-batches; the i-th skips the blocks ``skips[i % len(skips)]``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, VOCAB, (batch, CONTEXT + 1), generator=generator) for _ in range(n)]
    return [Tokens(text[:, :-1], text[:, 1:], frozenset(skips[i % len(skips)])) for i, text in enumerate(drawn)]
