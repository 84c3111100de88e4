"""How large the demo's model is.

Covers the numbers and the rules they obey.
Does not build the model: ``model`` does.
Must stay true: this module does not import torch, so that a wrong number is refused before anything heavy is loaded.
"""

from dataclasses import dataclass

HEAD_WIDTH = 64
"""Width of one attention head; the model's width is a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptShape:
    """How large the model is."""

    layers: int
    """Number of transformer blocks."""
    width: int
    """Width of the residual stream; a multiple of ``HEAD_WIDTH``."""
    sequence: int
    """Longest sequence, in tokens (bytes of text)."""
    dropout: float = 0.1
    """Share of values dropped on embeddings, attention weights and both residual branches."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.sequence < 1:
            raise ValueError(f"layers and sequence must be at least 1, got {self.layers} and {self.sequence}")
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ValueError(f"width must be a positive multiple of {HEAD_WIDTH}, got {self.width}")

    @property
    def num_heads(self) -> int:
        """Attention heads per block."""
        return self.width // HEAD_WIDTH
