"""Models on top of an encoder or a decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.nn.blocks import Decoder, Encoder


def mean_of(states: Tensor, mask: Tensor | None) -> Tensor:
    """Average [B, n, width] -> [B, width] over the tokens that are not padding."""
    if mask is None:
        return states.mean(1)
    return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def _readout(width: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class Classifier(nn.Module):
    """Classify texts by the mean of their states.

    >>> model = sparing.nn.Classifier(sparing.nn.Encoder(100, length=64), classes=10)
    >>> model(torch.randint(100, (3, 32))).shape
    torch.Size([3, 10])
    """

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.readout = _readout(encoder.width, 2 * encoder.width, classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return class scores: [B, n] -> [B, classes]."""
        return self.readout(mean_of(self.encoder(tokens, mask), mask))


class DualTower(nn.Module):
    """Classify pairs of texts from a, b, a * b and a - b, the states that one encoder computes for each text."""

    def __init__(self, encoder: Encoder, classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.readout = _readout(4 * encoder.width, 2 * encoder.width, classes)

    def forward(
        self, tokens: Tensor, other: Tensor, mask: Tensor | None = None, other_mask: Tensor | None = None
    ) -> Tensor:
        """Return class scores: [B, n] and [B, m] -> [B, classes]."""
        a, b = (mean_of(self.encoder(*each), each[1]) for each in ((tokens, mask), (other, other_mask)))
        return self.readout(torch.cat([a, b, a * b, a - b], dim=-1))


class _TokenHead(nn.Module):
    """Turn states into scores of all tokens, with the input embeddings as output weights."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(encoder.width, encoder.width), nn.GELU(), nn.LayerNorm(encoder.width))
        self.bias = nn.Parameter(torch.zeros(encoder.tokens.num_embeddings))

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        return nn.functional.linear(self.change(states), embeddings, self.bias)


class MaskedLM(nn.Module):
    """Predict the token at each position: [B, n] -> [B, n, vocabulary]."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = _TokenHead(encoder)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return token scores: [B, n] -> [B, n, vocabulary]."""
        return self.head(self.encoder(tokens, mask, segments), self.encoder.tokens.weight)


class Pretrained(NamedTuple):
    """What `Pretraining` returns."""

    tokens: Tensor  #: [B, n, vocabulary]
    order: Tensor  #: [B, 2]


class Pretraining(nn.Module):
    """Predict masked tokens and, from the first token's state, whether two parts are in order."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.masked = MaskedLM(encoder)
        self.order = nn.Sequential(nn.Linear(encoder.width, encoder.width), nn.Tanh(), nn.Linear(encoder.width, 2))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Pretrained:
        """Return the scores of tokens and of order. tokens, mask, segments: [B, n] each."""
        states = self.masked.encoder(tokens, mask, segments)
        scores = self.masked.head(states, self.masked.encoder.tokens.weight)
        return Pretrained(scores, self.order(states[:, 0]))


class CausalLM(nn.Module):
    """Predict the token after each position: [B, n] -> [B, n, vocabulary].

    >>> model = sparing.nn.CausalLM(sparing.nn.Decoder(256, length=128, method="kernel(kind=elu)"))
    >>> model(torch.randint(256, (2, 64))).shape
    torch.Size([2, 64, 256])
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if not decoder.causal:
            raise ValueError("decoder: its layers see later tokens; use sparing.nn.Decoder")
        self.decoder = decoder

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return token scores: [B, n] -> [B, n, vocabulary]."""
        return nn.functional.linear(self.decoder(tokens, mask), self.decoder.tokens.weight)
