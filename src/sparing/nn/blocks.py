"""Stacks of attention and feed-forward layers, with a method of choice in each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparing.contract import Method, Unsupported
from sparing.contract import method as _method
from sparing.nn.attention import MultiheadAttention

NORMS = ("pre", "post")


class Block(nn.Module):
    """A transformer block: attention, then a feed-forward network, each with a residual connection.

    norm: "pre" normalises the input of each part, "post" the sum after it, as BERT does.
    dropout: dropout probability for what each part adds. Attention weights are not dropped: few methods have any.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        method: str | Method = "exact",
        dropout: float = 0.0,
        causal: bool = False,
        norm: str = "pre",
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r} is not one of {', '.join(map(repr, NORMS))}")
        chosen = _method(method)
        if causal and not chosen.supports.causal:
            raise Unsupported(f"{chosen} cannot be causal; `sparing methods` lists those that can")
        if chosen.supports.gradient != "full":
            raise Unsupported(f"{chosen} has no gradient for queries and keys, so that nothing can be trained with it")
        self.attention = MultiheadAttention(width, heads, batch_first=True, method=chosen, max_length=max_length)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(dropout)
        self.causal, self.norm = causal, norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the states [B, n, width] after the block. x: [B, n, width]. mask: [B, n], False for padding."""
        hidden = None if mask is None else ~mask
        if self.norm == "pre":
            y = self.norms[0](x)
            x = x + self.dropout(self.attention(y, y, y, key_padding_mask=hidden, is_causal=self.causal)[0])
            return x + self.dropout(self.feed_forward(self.norms[1](x)))
        y = self.attention(x, x, x, key_padding_mask=hidden, is_causal=self.causal)[0]
        x = self.norms[0](x + self.dropout(y))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class Encoder(nn.Module):
    """Turn tokens into states, each of which depends on all tokens.

    vocabulary: how many tokens there are. length: the longest input, for learned positions.
    hidden: width of the feed-forward layers; None for four times the width.
    method: one method for all layers, or a list with one for each.
    segments: number of token types ("first sentence", "second sentence") with their own embeddings; 0 for none.

    >>> encoder = sparing.nn.Encoder(100, width=64, heads=2, layers=2, length=512, method="yoso(hashes=8)")
    >>> encoder(torch.randint(100, (3, 128))).shape
    torch.Size([3, 128, 64])
    """

    causal = False

    def __init__(
        self,
        vocabulary: int,
        *,
        length: int,
        width: int = 64,
        heads: int = 2,
        layers: int = 2,
        hidden: int | None = None,
        method: str | Method | Sequence[str | Method] = "exact",
        dropout: float = 0.0,
        norm: str = "pre",
        segments: int = 0,
    ) -> None:
        super().__init__()
        for name, number in (("vocabulary", vocabulary), ("length", length), ("layers", layers)):
            if number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        chosen = [method] * layers if isinstance(method, str | Method) else list(method)
        if len(chosen) != layers:
            raise ValueError(f"method: {len(chosen)} of them for layers={layers}; give one, or one for each layer")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(segments, width) if segments else None
        self.layers = nn.ModuleList(
            Block(
                width, heads, hidden or 4 * width, method=each, dropout=dropout, causal=self.causal, norm=norm,
                max_length=length,
            )
            for each in chosen
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)  # after the embeddings ("post"), or after the last layer ("pre")
        self.dropout = nn.Dropout(dropout)
        self.post = norm == "post"
        for table in (self.tokens, self.positions, self.segments):
            if table is not None:
                nn.init.normal_(table.weight, std=0.02)

    @property
    def width(self) -> int:
        return self.tokens.embedding_dim

    @property
    def length(self) -> int:
        """The longest input."""
        return self.positions.num_embeddings

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return states [B, n, width], zero for padding. tokens, segments: [B, n]. mask: [B, n], False for padding."""
        n = tokens.shape[1]
        if n > self.length:
            raise ValueError(f"tokens: {n} are more than length={self.length}; see extend_positions()")
        x = self.tokens(tokens) + self.positions.weight[:n]
        if segments is not None:
            if self.segments is None:
                raise ValueError("segments: this model has no segment embeddings; build it with segments=2")
            x = x + self.segments(segments)
        x = self.dropout(self.norm(x) if self.post else x)
        for layer in self.layers:
            x = layer(x, mask)
        x = x if self.post else self.norm(x)
        return x if mask is None else x * mask[..., None]

    def extend_positions(self, length: int) -> None:
        """Extend the learned positions to longer inputs by repeating them, as Longformer did.

        It is then the length that the model is made for: `yoso` without `bits` takes log2 of it from now on.
        """
        if length < self.length:
            raise ValueError(f"length={length} is less than the {self.length} positions that there are")
        for layer in self.layers:
            if isinstance(layer, Block) and layer.attention.method.name == "linformer":
                raise Unsupported("linformer has learned a projection of its length; train it anew for longer inputs")
        for layer in self.layers:
            if isinstance(layer, Block):
                layer.attention.max_length = length
        old = self.positions.weight
        rows = torch.arange(length, device=old.device) % self.length
        self.positions = nn.Embedding.from_pretrained(old.detach()[rows].clone(), freeze=not old.requires_grad)


class Decoder(Encoder):
    """Turn tokens into states for language models, each of which depends on the tokens up to its own.

    >>> decoder = sparing.nn.Decoder(100, length=512, method="window(size=64)")
    >>> decoder(torch.randint(100, (3, 128))).shape
    torch.Size([3, 128, 64])
    """

    causal = True
