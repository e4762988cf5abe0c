"""Run the measurements of a comparison in cells: errors in parallel, times one by one; all results are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.from_json import build
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.transformers.watch import ObservedCall
from sparing.workbench.calls import middle_calls
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.comparison.maps import HeadMap, can_draw, maps
from sparing.workbench.comparison.quality import Quality, quality
from sparing.workbench.comparison.races import LENGTHS, PATIENCE, RacePoint, race_at
from sparing.workbench.comparison.seconds import PaddingSeconds, Seconds, padding_seconds, seconds
from sparing.workbench.prepare import ModelSource, Prepared, fetched
from sparing.workbench.timing import Interval, threads

#: Oracles are slow yardsticks: they are measured on the first documents only.
ORACLE_DOCUMENTS = 2
_HEADS = 6  # the number of heads that are drawn, of different layers

Qualities = dict[str, list[dict[str, Any]]]  #: by spec, a `Quality` of each seed as a dict, or why it is refused


class Sweep:
    """The measurements of `compare()`."""

    def __init__(
        self,
        given: Prepared,
        specs: Sequence[str],
        store: Store,
        here: dict[str, Any],
        *,
        seeds: int,
        rounds: int,
        batch: int,
        lengths: bool,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.given, self.specs, self.store, self.here = given, list(specs), store, here
        self.seeds, self.rounds, self.progress = seeds, rounds, progress
        self.batch = given.rows[:batch] if batch > 1 else ()
        self.of = {
            "model": given.subject.fingerprint, "tokens": given.fingerprint,
            "versions": [here["torch"], here["transformers"], here["sparing"]],
        }  # fmt: skip
        self.done, self.steps = 0, len(self._quality_cells()) + len(specs) + lengths * len(LENGTHS)

    @property
    def padding(self) -> float:
        """The share of padding in the batch."""
        if not self.batch:
            return 0.0
        sizes = [len(ids) for ids in self.batch]
        return 1 - sum(sizes) / (len(sizes) * max(sizes))

    def qualities(self, jobs: int, backend: str | None) -> Qualities:
        """Return the errors of every method and seed."""
        cells = self._quality_cells()
        # A model without a name is pickled for other processes.
        source: ModelSource = self.given.source if jobs > 1 or backend is not None else self.given.subject
        work = functools.partial(_quality, source, self.given.rows, self.given.pairs, self.given.types)
        found: Qualities = {spec: [] for spec in self.specs}
        parts = measured(cells, work, self.store, check=_check_quality, jobs=jobs, backend=backend, done=self._tell)
        for cell, part in zip(cells, parts, strict=True):
            found[cell["method"]].append(part)
        return found

    def _quality_cells(self) -> list[Cell]:
        rows = len(self.given.rows)
        return [
            {
                "what": "quality",
                **self.of,
                "method": spec,
                "seed": seed,
                "documents": min(rows, ORACLE_DOCUMENTS) if _method(spec).oracle else rows,
            }
            for spec in self.specs
            for seed in range(self.seeds if _method(spec).supports.stochastic else 1)
        ]

    def seconds(self) -> dict[str, dict[str, Any]]:
        """Return the times and the memory of every method, measured one after the other."""
        cells: list[Cell] = [
            {
                "what": "seconds",
                **self.of,
                "machine": self.here,
                "rounds": self.rounds,
                "method": spec,
                "batch": len(self.batch),
            }
            for spec in self.specs
        ]
        found = measured(cells, self._seconds, self.store, check=_check_seconds, keep=_is_kept, done=self._tell)
        return dict(zip(self.specs, found, strict=True))

    def _seconds(self, cell: Cell) -> dict[str, Any]:
        with threads(self.here["threads"]):
            try:
                found = seconds(
                    self.given.subject, self.given.typical, cell["method"], rounds=self.rounds, batch=self.batch
                )
            except Unsupported as error:
                return {"refused": str(error)}
        return asdict(found)

    def padding_seconds(self) -> PaddingSeconds | None:
        """Return what the padding of the batch costs; None if there is none, or it cannot be removed."""
        if not self.padding or self.given.subject.kind == "language model":
            return None
        cell = {"what": "padding", **self.of, "machine": self.here, "rounds": self.rounds, "batch": len(self.batch)}
        (part,) = measured([cell], self._padding, self.store, check=_check_padding, keep=_is_kept)
        return None if is_refusal(part) else build(PaddingSeconds, part)

    def _padding(self, cell: Cell) -> dict[str, Any]:
        with threads(self.here["threads"]):
            try:
                found = padding_seconds(self.given.subject, self.batch, rounds=min(self.rounds, 3))
            except Unsupported as error:
                return {"refused": str(error)}
        return asdict(found)

    def points(self) -> dict[str, tuple[RacePoint, ...]]:
        """Race the middle layer's calls at growing lengths, until a round takes too long."""
        racers = [spec for spec in self.specs if not _method(spec).oracle]
        found: dict[str, list[RacePoint]] = {spec: [] for spec in racers}
        seen: list[ObservedCall] = []  # filled when it is first needed
        for length in LENGTHS if racers else ():
            cell = {"what": "race", **self.of, "machine": self.here, "methods": racers, "length": length}
            race = functools.partial(self._race, racers, length, seen)
            (part,) = measured([cell], race, self.store, check=_check_race, keep=_is_kept, done=self._tell)
            raced = build(_Race, part)
            for spec, ratio in raced.ratios.items():
                if ratio is not None and not raced.disturbed:
                    found[spec].append(RacePoint(length, ratio))
            if raced.seconds > PATIENCE / 4:  # the next length takes up to four times as long
                break
        return {spec: tuple(points) for spec, points in found.items()}

    def _race(self, racers: Sequence[str], length: int, seen: list[ObservedCall], cell: Cell) -> dict[str, Any]:
        with threads(self.here["threads"]):
            if not seen:
                seen += middle_calls(self.given.subject, self.given.rows, [*racers, "top_keys(keys=1)"])
            if not seen:
                return {"ratios": {}, "seconds": PATIENCE}
            ratios, taken, disturbed = race_at(seen, racers, length)
        return {"ratios": ratios, "seconds": taken, "disturbed": disturbed}

    def maps(self, found: Qualities, head: tuple[int, int] | None) -> tuple[HeadMap, ...]:
        """Return pictures of the most fragile heads, and of one that the user names."""
        heads = fragile(found)
        names = layer_names(found)
        if head is not None and head[0] < len(names):
            heads = list(dict.fromkeys([(names[head[0]], *head), *heads]))
        drawable = [spec for spec in self.specs if can_draw(_method(spec)) and "refused" not in found[spec][0]]
        if not heads or not drawable:
            return ()
        cells = [
            {"what": "map", **self.of, "method": spec, "heads": [list(each) for each in heads]}
            for spec in dict.fromkeys(["exact", *drawable])
        ]
        work = functools.partial(_maps, self.given.subject, self.given.rows[0], heads)
        parts = measured(cells, work, self.store, check=_check_maps)
        return tuple(HeadMap(**each) for part in parts for each in part)

    def _tell(self, cell: Cell, again: bool) -> None:
        self.done += 1
        self.progress(
            f"{cell.get('method', cell.get('length'))}: {cell['what']}", self.done, max(self.steps, self.done)
        )


@dataclass(frozen=True)
class _Race:
    """What is kept of a race at one length."""

    ratios: dict[str, Interval | None]  #: time of SDPA / time of the method; None where it cannot run
    seconds: float  #: of a quiet round
    disturbed: str = ""  #: by what, if the ratios say nothing


def _check_quality(cell: Cell, result: Any) -> None:
    if not is_refusal(result):
        found = build(Quality, result)
        if not len(found.ends) == len(found.errors) == cell["documents"]:
            raise ValueError(f"ends and errors must be of {cell['documents']} documents")


def _check_seconds(cell: Cell, result: Any) -> None:
    if not is_refusal(result):
        build(Seconds, result)


def _check_padding(cell: Cell, result: Any) -> None:
    if not is_refusal(result):
        build(PaddingSeconds, result)


def _is_kept(result: Any) -> bool:
    """Return whether a result with times is worth keeping."""
    return not result.get("disturbed")


def _check_race(cell: Cell, result: Any) -> None:
    if not build(_Race, result).ratios.keys() <= set(cell["methods"]):
        raise ValueError("ratios must be of the methods that were raced")


def _check_maps(cell: Cell, result: Any) -> None:
    if not isinstance(result, list) or not all(build(HeadMap, each).is_whole() for each in result):
        raise ValueError("maps must be a list of whole pictures")


def fragile(found: Qualities) -> list[tuple[str, int, int]]:
    """Return the heads with the largest errors, one per layer: name of the layer, its index, head."""
    totals: dict[tuple[str, int, int], float] = {}
    for spec, (first, *_) in found.items():
        if "refused" in first or _method(spec).oracle or _method(spec).name == "exact":
            continue
        for number, layer in enumerate(first["layers"]):
            for head, error in enumerate(layer["heads"]):
                key = (layer["layer"], number, head)
                totals[key] = totals.get(key, 0.0) + min(
                    error, 1.0
                )  # a diverging method counts as one that is entirely wrong
    worst: dict[str, tuple[str, int, int]] = {}
    for key in sorted(totals, key=lambda key: (-totals[key], key[1:])):
        worst.setdefault(key[0], key)
    return sorted(list(worst.values())[:_HEADS], key=lambda key: key[1])


def layer_names(found: Qualities) -> list[str]:
    """Return the names of the layers that ran a method."""
    return next(([layer["layer"] for layer in x["layers"]] for x, *_ in found.values() if "refused" not in x), [])


def _quality(
    source: ModelSource,
    rows: Sequence[Tensor],
    pairs: Sequence[Tensor] | None,
    types: Sequence[Tensor] | None,
    cell: Cell,
) -> Any:
    with threads(1):
        some = rows[: cell["documents"]]
        try:
            return asdict(quality(fetched(source), some, cell["method"], seed=cell["seed"], pairs=pairs, types=types))
        except Unsupported as error:
            return {"refused": str(error)}


def _maps(subject: Subject, ids: Tensor, heads: Sequence[tuple[str, int, int]], cell: Cell) -> Any:
    with threads(1):
        return [asdict(each) for each in maps(subject, ids, cell["method"], heads)]
