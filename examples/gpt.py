"""A character-level GPT as a Paceline workload, trained on a text that every machine has: the source of argparse.

Run it in this folder:

    paceline train gpt:make_workload --strategy ddp --ranks 2 --batch 32 --accumulate 2 --clip-norm 1.0 --steps 200

Result: training loss 4.49 → 1.84 nats per character (first step → mean of the last 20), test loss 1.81 to 1.84; mean
and range of 3 seeds. Conditions: 200 steps, 2 ranks with one thread each, torch 2.13, Python 3.11; it takes 4.2 to
4.4 s on two cores of an AMD EPYC. `--strategy single` with seed 0 reaches the same test loss, 1.8158.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload

CONTEXT = 64
"""Length of a training sequence, in characters."""


class Block(nn.Module):
    """Transformer block: causal self-attention, then a feed-forward network for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; input and output have the shape (batch, length, width)."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(x)

    def attend(self, x: Tensor) -> Tensor:
        """Return the causal self-attention of each position over the positions before it."""
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Decoder-only transformer; the output layer shares its weight with the token embedding."""

    def __init__(self, vocabulary: int, *, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(
                embedding.weight, std=0.02
            )  # The weight is tied, and PyTorch's std of 1 would give huge logits.

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits for the character after each position: (batch, length) to (batch, length, vocabulary)."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.blocks(self.token(characters) + self.position(positions))
        return F.linear(self.norm(x), self.token.weight)


def next_character_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_optimizer(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only, not on biases and norms."""
    groups = [
        {"params": [(name, p) for name, p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def make_workload() -> Workload:
    """Return the workload: predict the next character; the last tenth of the text is the test set."""
    text = inspect.getsource(argparse)
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    characters = torch.tensor([vocabulary[character] for character in text])
    train, test = characters.tensor_split([len(text) * 9 // 10])
    return Workload(
        name="gpt on argparse.py",
        model=GPT(len(vocabulary)),
        train=windows(train, every=1),
        test=windows(test, every=CONTEXT),
        loss=next_character_loss,
        optimizer=make_optimizer,
    )


def windows(characters: Tensor, *, every: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and targets shifted by one character. Both are views, so overlapping windows need no memory."""
    views = characters.unfold(0, CONTEXT + 1, every)
    return views[:, :-1], views[:, 1:]
