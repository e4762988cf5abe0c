"""Language modelling on bytes: predict the next byte, hidden bytes, or the order of two parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from sparing.documents import read
from sparing.sample_text import distinct_topics
from sparing_lab.tasks.hub import Hub
from sparing_lab.tasks.trainable import Example, Objective, Split, Task

BYTES = 260  #: the vocabulary: padding, [MASK], [CLS], [SEP], then each byte
MASK, START, STOP = 1, 2, 3
_FIRST = 4
HIDDEN = 0.15  #: share of the tokens that are predicted
VALID = 256  #: held-out pieces at most
_ORDERED = 2**14  # held-out tokens of "order" at least: each piece has one order, so short pieces must be many


def causal_task(length: int, seed: int, data: Sequence[Path] | Hub | None = None) -> Task:
    """Return the task of predicting the next byte."""
    return _task("causal", "next", length, seed, data)


def masked_task(length: int, seed: int, data: Sequence[Path] | Hub | None = None) -> Task:
    """Return the task of predicting hidden bytes."""
    return _task("masked", "masked", length, seed, data)


def order_task(length: int, seed: int, data: Sequence[Path] | Hub | None = None) -> Task:
    """Return the task of predicting hidden bytes and whether two parts are in order, as YOSO was pretrained."""
    return _task("order", "order", length, seed, data)


def _task(name: str, objective: Objective, length: int, seed: int, data: Sequence[Path] | Hub | None) -> Task:
    if length < 16:
        raise ValueError(f"max_length={length} is too short for text; take 16 or more")
    if data is None:
        texts, where = distinct_topics(), "Python help topics"
    elif isinstance(data, Hub):
        texts, where = [text for (text,) in data.rows(("train",), (("text",),)) if text], str(data)
    else:
        texts, where = list(read(data, whole=True).texts), ", ".join(path.name for path in data)
    held, seen = _held_out(texts, length)
    return Task(
        name, where, objective, BYTES, length, _split(seen, objective, length, seed, held=False),
        _split(held, objective, length, seed, held=True), mask=None if objective == "next" else MASK,
        special=(0, START, STOP) if objective == "order" else (0,),
    )  # fmt: skip


def _held_out(texts: Sequence[str], length: int) -> tuple[bytes, bytes]:
    """Return a twentieth of the text as held-out bytes, in pieces spread over all of it, and the rest."""
    raw = "\n\n".join(texts).encode()
    piece = max(4 * length, 4096)
    pieces = [raw[start : start + piece] for start in range(0, len(raw), piece)]
    if len(pieces) < 4:
        raise ValueError(
            f"data: {len(raw)} bytes are too few for max_length={length}; it takes {3 * piece + 1} or more"
        )
    every = min(20, len(pieces))
    held = [part for number, part in enumerate(pieces) if number % every == every // 2]
    seen = [part for number, part in enumerate(pieces) if number % every != every // 2]
    return b"".join(held), b"".join(seen)


def _split(raw: bytes, objective: Objective, length: int, seed: int, *, held: bool) -> Split:
    """Return pieces from random places for training, or evenly spread ones if held out."""
    numbers = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() + _FIRST
    room = len(numbers) - length
    most = max(VALID, _ORDERED // length) if objective == "order" else VALID
    count = min(most, max(room // (length // 2), 1)) if held else max(room // length, 1)

    def example(number: int) -> Example:
        random = Random(f"{objective} {seed} {held} {number}")
        start = number * room // count if held else random.randrange(room + 1)
        if objective != "order":
            return Example(numbers[start : start + length])
        return _ordered(numbers[start : start + length - 3], random)

    return Split(count, example, [length] * count)


def _ordered(piece: Tensor, random: Random) -> Example:
    """Return [CLS] a [SEP] b [SEP] with label 0, or [CLS] b [SEP] a [SEP] with label 1."""
    cut = random.randint(len(piece) // 3, 2 * len(piece) // 3)
    one, two = piece[:cut], piece[cut:]
    turned = random.random() < 0.5
    first, second = (two, one) if turned else (one, two)
    start, stop = torch.tensor([START]), torch.tensor([STOP])
    tokens = torch.cat([start, first, stop, second, stop])
    segments = (torch.arange(len(tokens)) >= len(first) + 2).long()
    return Example(tokens, int(turned), segments=segments)


def hide(tokens: Tensor, task: Task, random: torch.Generator, share: float = HIDDEN) -> tuple[Tensor, Tensor]:
    """Return tokens [B, n] with some hidden (80 % masked, 10 % replaced, 10 % kept, as in BERT), and which."""
    special = torch.zeros_like(tokens, dtype=torch.bool)
    for each in task.special:
        special |= tokens == each
    drawn = torch.rand(tokens.shape, generator=random).masked_fill(special, 2)
    asked = drawn < share
    asked |= ~asked.any(-1, keepdim=True) & (drawn == drawn.amin(-1, keepdim=True)) & ~special  # at least one
    how = torch.rand(tokens.shape, generator=random)
    lowest = max(*task.special, task.mask or 0) + 1
    others = torch.randint(lowest, task.vocabulary, tokens.shape, generator=random)
    hidden = torch.where(asked & (how < 0.8), task.mask or 0, tokens)
    return torch.where(asked & (how >= 0.9), others, hidden), asked
