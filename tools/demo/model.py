"""A byte-level GPT of the demo's own, so that it needs no model library and no download.

Covers the module: pre-LayerNorm blocks, causal attention, GELU MLP, dropout everywhere, learned positions.
Does not train, time or offload it: ``segment`` does.
Must stay true: it is an ordinary model. Nothing in it knows about offload, and its dropout stays on, because random
numbers are what an offload that reorders work would get wrong first.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shape import GptShape

VOCABULARY = 256
"""One token per byte value."""


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a position sees only itself and what is before it."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[batch, sequence, width]`` to the same shape."""
        batch, sequence, width = hidden.shape
        heads = self.qkv(hidden).view(batch, sequence, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, sequence, head width]
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return result


class Block(nn.Module):
    """One pre-LayerNorm transformer block: attention, then an MLP four times as wide, each added to the stream."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = CausalAttention(shape)
        self.attention_dropout = nn.Dropout(shape.dropout)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """``[batch, sequence, width]`` to the same shape."""
        hidden = hidden + self.attention_dropout(self.attention(self.attention_norm(hidden)))
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class Gpt(nn.Module):
    """A byte-level language model that returns its own training loss."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.sequence, shape.width)
        self.embedding_dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of predicting each next byte.

        Args:
            tokens: Byte values, int64, ``[batch, sequence]``.
            targets: The byte after each of them, int64, ``[batch, sequence]``.

        Returns:
            A scalar, float32, on the model's device.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.final_norm(hidden))  # [batch, sequence, VOCABULARY]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    """Small normal weights and zero biases, the usual start of a GPT."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
