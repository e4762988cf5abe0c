"""An index, and the cache beside it, work the same whichever of torch's modes each call, copy and edit runs in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparing
from tests.support.growing_sequences import MULTIPOLE, Sequence, sequence

MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
MIXED = list(product(("plain", "inference"), ("plain", "inference"), MODES))  # of the prompt, what is done to it, steps


def cropped(index: sparing.Index, length: int) -> sparing.Index:
    index.crop(length)
    return index


def selected(index: sparing.Index) -> sparing.Index:
    index.select(torch.tensor([1, 0]))
    index.select(torch.tensor([1, 0]))
    return index


def started_again(index: sparing.Index, x: Sequence) -> sparing.Index:
    index.reset()
    index.append(*x.part(0, 70))
    return index


EDITS: dict[str, Callable[[sparing.Index, Sequence], sparing.Index]] = {
    "deepcopy": lambda index, x: copy.deepcopy(index),
    "pickle": lambda index, x: pickle.loads(pickle.dumps(index)),
    "crop": lambda index, x: cropped(index, 65),  # within a block
    "deep crop": lambda index, x: cropped(index, 50),  # takes apart what stood for blocks
    "select": lambda index, x: selected(index),
    "reset": started_again,
}


def run(spec: str, x: Sequence, edit: str, prompt: str, middle: str, step: str) -> Tensor:
    """A prompt and steps, an edit, and more steps, each in its mode; the inputs are made in the mode of their call."""
    index = sparing.Index(spec, seed=3)
    with MODES[prompt]():
        index.attention(*(y if y is None else y.clone() for y in x.part(0, 67)))
        for n in range(67, 70):
            index.attention(*x.part(n, n + 1))
    with MODES[middle]():
        index = EDITS[edit](index, x)
    start = index.length
    with MODES[step]():
        several = index.attention(*(y if y is None else y.clone() for y in x.part(start, start + 8)))
        return torch.cat([several, *(index.attention(*x.part(n, n + 1)) for n in range(start + 8, start + 14))], 2)


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_does_the_same_in_every_mode(edit):
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, :7] = keep[1, 66:68] = False
    whole, padded = sequence(batch=2, heads=1), sequence(batch=2, heads=1, keep=keep)
    for spec, x in ((MULTIPOLE, whole), (MULTIPOLE, padded), ("window(size=16, sinks=2)", padded)):
        wanted = run(spec, x, edit, "plain", "plain", "plain")
        for modes in MIXED:
            assert torch.equal(run(spec, x, edit, *modes), wanted), f"{spec}: {modes}"


def test_a_copy_made_in_inference_mode_leaves_the_original_alone():
    x, index = sequence(batch=2), sparing.Index(MULTIPOLE, seed=3)
    index.attention(*x.part(0, 70))
    wanted = copy.deepcopy(index).attention(*x.part(70, 95))
    with torch.inference_mode():
        other = copy.deepcopy(index)
        other.attention(*x.part(70, 95))
    assert (index.length, other.length) == (70, 95)
    assert torch.equal(index.attention(*x.part(70, 95)), wanted)


def test_a_plain_copy_is_independent_of_the_original():
    x, index = sequence(batch=2), sparing.Index(MULTIPOLE, seed=3)
    index.attention(*x.part(0, 70))
    wanted = copy.deepcopy(index).attention(*x.part(70, 95))
    other = copy.copy(index)
    other.attention(*sequence(batch=2, seed=5).part(70, 95))
    other.reset()
    assert index.length == 70
    assert torch.equal(index.attention(*x.part(70, 95)), wanted)
