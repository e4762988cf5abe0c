"""Race an encoder on batches of texts of mixed length: as they are padded, without padding, and approximated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.contract import method as _method
from sparing.from_json import build
from sparing.models import Subject
from sparing.store import verify_checksum, without_nan
from sparing.transformers.handle import approximate
from sparing.workbench.machine import machine
from sparing.workbench.timing import Interval, interval, race, undisturbed

FORMAT = 1
ORDERS = ("as given", "by length")  #: of the texts before they are cut into batches; `encode` sorts them
PADDED, PACKED = "exact, padded", "exact, without padding"
SAME = 1e-4  #: difference of an exact embedding's entries, of unit length, above which nothing is called faster
#: Tokens of texts that are drawn where the user gives none: their logarithms are normal, about as those of IMDB's
#: reviews (median 230, and two of three within a factor of 1.9).
MEDIAN, SPREAD = 230, 0.65


@dataclass(frozen=True, kw_only=True)
class PaddedTiming:
    """One side on all batches of one order."""

    side: str  #: `PADDED`, `PACKED`, or a method, which runs without padding
    order: str
    seconds: Interval
    speed: Interval  #: time of `PADDED` / time of this side
    change: float  #: mean over texts of 1 - cosine to the embedding of the exact model


@dataclass(frozen=True, kw_only=True)
class PaddedBench:
    """The result of `sparing bench --padded`."""

    model: str
    data: str
    texts: int
    tokens: int  #: of all texts
    batch_size: int
    padding: dict[str, float]  #: by order: share of the positions of all batches
    batches: tuple[PaddedTiming, ...]
    difference: float  #: largest difference of an entry of an exact embedding without padding
    machine: dict[str, Any]
    disturbed: str = ""  #: by what, if the times say nothing

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; `from_dict` reads it back."""
        found: dict[str, Any] = without_nan({"format": FORMAT, **asdict(self)})
        return found

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> PaddedBench:
        """Read the parsed JSON; a ValueError names the part that is wrong."""
        held = verify_checksum(held)
        if held.pop("format", None) != FORMAT:
            raise ValueError(f"this format of a benchmark is not known; this sparing reads {FORMAT}")
        return build(cls, held)


def drawn_rows(subject: Subject, count: int, most: int, seed: int = 0) -> list[Tensor]:
    """Return token ids of `count` texts of random tokens and lengths, of at most `most` tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = (MEDIAN * torch.exp(SPREAD * torch.randn(count, generator=random))).round().clamp(8, most).long()
    words = int(subject.model.config.vocab_size)
    return [torch.randint(words // 2, words, (int(n),), generator=random) for n in lengths]


@torch.inference_mode()
def padded_bench(
    subject: Subject, rows: Sequence[Tensor], data: str, *, methods: Sequence[str] = (), batch_size: int = 32,
    rounds: int = 3, progress: Callable[[str, int, int], None] = lambda text, done, steps: None,
) -> PaddedBench:  # fmt: skip
    """Embed texts [n] in padded batches, in both orders, by each side in turn.

    methods: run without padding, beside exact attention with and without padding. data: a name for the texts.
    """
    if subject.kind == "language model":
        raise ValueError(f"model: {subject.name} is a language model; encoders embed batches of texts")
    if not 2 <= batch_size <= len(rows):
        raise ValueError(f"batch_size={batch_size} must be from 2 to {len(rows)}, the number of texts")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    specs = [str(_method(spec)) for spec in methods]
    batches = {order: _batches(rows, batch_size, order) for order in ORDERS}
    sides = [PADDED, PACKED, *(spec for spec in specs if spec != "exact")]
    found: list[PaddedTiming] = []
    difference, said = 0.0, ""
    for number, order in enumerate(ORDERS):
        exact = _embeddings(subject, batches[order])
        changes = {PADDED: 0.0}
        for side in sides[1:]:
            with _running(subject, side):
                got = _embeddings(subject, batches[order])
            changes[side] = float(1 - torch.nn.functional.cosine_similarity(got, exact, dim=-1).mean())
            if side == PACKED:
                difference = max(difference, _difference(got, exact))
        progress(f"{order}: embeddings", 2 * number + 1, 2 * len(ORDERS))

        def measure(order: str = order) -> list[list[float]]:
            return race([_runner(subject, side, batches[order]) for side in sides], [rounds + 1] * len(sides))

        times, disturbed = undisturbed(measure, lambda parts: parts[0][1:])
        said = said or disturbed
        progress(f"{order}: times", 2 * number + 2, 2 * len(ORDERS))
        for side, taken in zip(sides, times, strict=True):
            speed = interval([a / b for a, b in zip(times[0][1:], taken[1:], strict=True)])
            found.append(
                PaddedTiming(side=side, order=order, seconds=interval(taken[1:]), speed=speed, change=changes[side])
            )
    return PaddedBench(
        model=subject.name, data=data, texts=len(rows), tokens=sum(map(len, rows)), batch_size=batch_size,
        padding={order: _padding(batches[order]) for order in ORDERS}, batches=tuple(found), difference=difference,
        machine=machine(), disturbed=said,
    )  # fmt: skip


def _batches(rows: Sequence[Tensor], size: int, order: str) -> list[list[Tensor]]:
    ordered = list(rows) if order == ORDERS[0] else sorted(rows, key=len, reverse=True)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _padding(batches: Sequence[Sequence[Tensor]]) -> float:
    positions = sum(len(batch) * max(map(len, batch)) for batch in batches)
    return 1 - sum(len(row) for batch in batches for row in batch) / positions


@contextmanager
def _running(subject: Subject, side: str) -> Iterator[None]:
    what = "exact" if side == PACKED else side
    with nullcontext() if side == PADDED else approximate(subject.model, what, padding="remove"):
        yield


def _runner(subject: Subject, side: str, batches: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
    def run() -> None:
        with _running(subject, side):
            for batch in batches:
                subject.run_batch(batch)

    return run


def _embeddings(subject: Subject, batches: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the embedding of each text, or its logits, of unit length."""
    found = []
    for batch in batches:
        output = subject.run_batch(batch)
        if subject.kind == "classifier":
            found += list(output.logits.double())
        else:
            found += [subject.embedding(x[: len(row)]) for x, row in zip(output.last_hidden_state, batch, strict=True)]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


def _difference(got: Tensor, exact: Tensor) -> float:
    largest = float((got - exact).abs().max())
    return largest if math.isfinite(largest) else math.inf
