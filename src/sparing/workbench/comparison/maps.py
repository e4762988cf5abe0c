"""Draw where a head attends, exactly and by a method, as small pictures: blocks of queries by blocks of keys."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.functional import attention
from sparing.models import Subject
from sparing.transformers.watch import ObservedCall, observe_calls

SIZE = 48  #: blocks along each side, at most
_SMALL = 1e-3  # of the values: what marks the blocks must not change which keys a method chooses


@dataclass(frozen=True)
class HeadMap:
    """The picture of one head and one method, on the first document."""

    layer: str
    number: int  #: index of the layer
    head: int
    method: str  #: a spec; "exact" for the model's own attention
    side: int  #: blocks of queries, and blocks of keys
    pixels: str  #: base64 of side x side bytes, a row for each block of queries: 255 * sqrt(share of its weight)

    def is_whole(self) -> bool:
        """Return whether the number of pixels is side x side."""
        try:
            return 0 < self.side <= SIZE and len(base64.b64decode(self.pixels, validate=True)) == self.side**2
        except ValueError:
            return False


def can_draw(method: Method) -> bool:
    """Return whether a method has weights to draw: not if it samples values, nor for oracles that choose by values."""
    return not method.supports.projection and (not method.oracle or method.name == "top_keys")


@torch.no_grad()
def maps(
    subject: Subject, ids: Tensor, what: str, heads: Sequence[tuple[str, int, int]], *, seed: int = 0
) -> list[HeadMap]:
    """Return pictures of heads (name of the layer, its index, head) for a document [n], with exact inputs.

    what: a spec, or "exact". A method is linear in the values that it reads, so marks beside the values come out as the
    weight of every block.
    """
    method = _method(what)
    wanted: dict[str, list[tuple[int, int]]] = {}
    for layer, number, head in heads:
        wanted.setdefault(layer, []).append((number, head))
    found: list[HeadMap] = []

    def see(seen: ObservedCall) -> None:
        if seen.layer not in wanted:
            return
        weights = _blocks(seen, method)
        for number, head in wanted[seen.layer]:
            pixels = (255 * weights[head].clamp(0, 1).sqrt()).round().to(torch.uint8)
            text = base64.b64encode(pixels.numpy().tobytes()).decode()
            found.append(HeadMap(seen.layer, number, head, what, len(pixels), text))

    # Observing needs a method that every layer can run, also where only exact attention is drawn.
    with observe_calls(subject.model, "top_keys(keys=1)" if method.name == "exact" else method, see, seed=seed):
        subject.run(ids)
    return found


def _blocks(seen: ObservedCall, method: Method) -> Tensor:
    """Return [H, side, side]: the share of weight from each block of queries to each block of keys."""
    values = seen.projected
    length, queries = values.shape[2], seen.query.shape[2]
    side = min(SIZE, length, queries)
    block = torch.arange(length) * side // length
    scale = _SMALL * float(values.abs().mean()) + 1e-30
    marks = torch.nn.functional.one_hot(block, side).to(values) * scale
    marked = torch.cat([values, marks.expand(*values.shape[:2], -1, -1)], -1)
    out = attention(seen.query, seen.key, marked, **seen.with_method(method))[0, ..., -side:] / scale
    rows = torch.nn.functional.one_hot(torch.arange(queries) * side // queries, side).to(out)
    return (rows / rows.sum(0)).mT @ out
