"""Measure speed and memory of every method against exact attention at growing lengths, in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sparing.contract import Method, Shape, method
from sparing.workbench import memory
from sparing.workbench.benchmark import gate
from sparing.workbench.benchmark.facts import facts
from sparing.workbench.benchmark.peers import CannotRun, Peer, peers_of
from sparing.workbench.benchmark.results import (
    SDPA,
    SDPA_BF16,
    SDPA_PROJECTION,
    TARGETS,
    Bench,
    BenchSettings,
    Pass,
    PeerStatus,
    Ratio,
    Timing,
    baseline,
)
from sparing.workbench.benchmark.workload import (
    AttentionInputs,
    Workload,
    clustered,
    describe,
    learned_state,
    method_work,
    sdpa_with_projection,
    sdpa_work,
)
from sparing.workbench.machine import machine
from sparing.workbench.timing import interval, race, threads, undisturbed

METHODS: tuple[str, ...] = (*dict.fromkeys(target.method for target in TARGETS), "monte_carlo(alpha=0.2)")
GATE_LENGTH = 1000  # not a multiple of a block, so that remainders are checked

_MOST_ROUNDS = 9
_SHARE = 4  # rounds of a side may take this part of `seconds`, unless that makes fewer than three
_WARM_UP = 1.0  # seconds: a longer call is not run in advance
_GRAIN = 0.02  # seconds: shorter calls are repeated within a round
_FREE = 0.7  # of the memory that is free

Progress = Callable[[str, int, int], None]


def bench(settings: BenchSettings, *, progress: Progress = lambda text, done, steps: None) -> Bench:
    """Measure everything that `settings` asks for. `progress` is called with the next step, steps done and all steps.

    Each length is one race: every round times all methods, SDPA and public implementations, so that both
    times of a ratio are taken next to each other. A side is left out where its time, extrapolated from shorter lengths,
    exceeds `seconds` for two rounds, or its memory what is available; results are never extrapolated. A method that
    differs from its reference is left out.
    """
    start = time.perf_counter()
    chosen = [method(spec) for spec in settings.methods]
    steps = len(chosen) + len(settings.lengths) * len(settings.passes) + 1
    done = 0
    gates: list[gate.Gate] = []
    with threads(settings.threads):
        sample = clustered(settings.batch, settings.heads, min(GATE_LENGTH, settings.lengths[-1]), settings.width)
        for one in chosen:
            progress(f"{one}: comparing with its reference", done, steps)
            gates.append(gate.check(one, sample, backward=settings.backward))
            done += 1
        track = _Track(settings, _sides(chosen, gates, settings))
        for length in settings.lengths:
            inputs = clustered(settings.batch, settings.heads, length, settings.width)
            for part in settings.passes:
                progress(f"{length} tokens, {part}", done, steps)
                track.run(inputs, part, lambda text, at=done: progress(text, at, steps))  # type: ignore[misc]
                done += 1
        progress("figures beside the table", done, steps)
        beside = facts(settings, gates, track.timings)
        progress("done", steps, steps)
        return Bench(
            settings=settings,
            machine=machine(),
            inputs=describe(sample),
            gates=gates,
            timings=track.timings,
            ratios=track.ratios,
            disturbed=track.disturbed,
            peers=_statuses(chosen) if settings.peers else [],
            facts=beside,
            duration=time.perf_counter() - start,
        )


@dataclass(kw_only=True)
class _Side:
    """A method, SDPA or a public implementation, with its times and memory at shorter lengths."""

    name: str
    build: Callable[[AttentionInputs], Workload]
    method: Method | None = None  #: what it computes; None for exact attention
    rivals: tuple[str, ...] = ()  #: sides that a ratio is stated against
    why: dict[Pass, str] = field(default_factory=dict)  #: why it is left out
    seconds: dict[Pass, list[tuple[int, float]]] = field(default_factory=dict)
    memory: dict[Pass, list[tuple[int, float]]] = field(default_factory=dict)

    def refusal(self, length: int, part: Pass, settings: BenchSettings) -> str:
        """Return why it would take too long or too much memory at this length; empty if it would not."""
        if part in self.why:
            return self.why[part]
        seconds = self.expected(length, part, settings)
        if seconds is not None and rounds_for(seconds, settings.seconds) == 0:
            return f"about {seconds:.0f} s a call: two exceed the {settings.seconds:g} s of a side"
        needed, free = self._needed(length, part, settings), memory.available_bytes()
        if free is not None and needed > _FREE * free:
            return f"about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        return ""

    def expected(self, length: int, part: Pass, settings: BenchSettings) -> float | None:
        """Return the expected seconds of a call, from shorter lengths; None if there are none."""
        points = self.seconds.get(part, [])
        if len(points) != 1 or self.method is None:
            return extend(points, length)
        work = [self.method.cost(_shape(n, settings)).flops for n in (points[0][0], length)]
        return extend(points, length, power=math.log(work[1] / work[0]) / math.log(length / points[0][0]))

    def _needed(self, length: int, part: Pass, settings: BenchSettings) -> float:
        found = extend(self.memory.get(part, []), length)
        if found is not None or self.method is None:
            return found or 0.0
        return self.method.cost(_shape(length, settings)).bytes


def _shape(length: int, settings: BenchSettings) -> Shape:
    return Shape(
        batch=settings.batch, heads=settings.heads, queries=length, keys=length, head_dim=settings.width,
        value_dim=settings.width,
    )  # fmt: skip


def extend(points: Sequence[tuple[int, float]], length: int, *, power: float = 2.0) -> float | None:
    """Extrapolate to a longer sequence from the last two lengths, or by `power` from a single one.

    The power is limited to 1 to 2.

    >>> extend([(1024, 1.0), (2048, 2.0)], 4096), extend([(1024, 1.0)], 4096), extend([(1024, 1.0)], 4096, power=1.0)
    (4.0, 16.0, 4.0)
    """
    if not points:
        return None
    n, value = points[-1]
    if len(points) > 1 and min(value, points[-2][1]) > 0:
        power = math.log(value / points[-2][1]) / math.log(n / points[-2][0])
    return value * (length / n) ** min(max(power, 1.0), 2.0)


def rounds_for(seconds: float, budget: float) -> int:
    """Return the rounds of a call of so many seconds: nine for a short one, two for a long one, 0 if two exceed it.

    >>> rounds_for(0.01, 60), rounds_for(5, 60), rounds_for(25, 60), rounds_for(31, 60)
    (9, 3, 2, 0)
    """
    if 2 * seconds > budget:
        return 0
    return max(min(int(budget / _SHARE / seconds), _MOST_ROUNDS), 3 if 3 * seconds <= budget else 2)


class _Track:
    """Run the races and keep their results."""

    def __init__(self, settings: BenchSettings, sides: list[_Side]) -> None:
        self.settings, self.sides = settings, sides
        self.timings: list[Timing] = []
        self.ratios: list[Ratio] = []
        self.disturbed = ""

    def run(self, inputs: AttentionInputs, part: Pass, tell: Callable[[str], None]) -> None:
        """Race all sides that can run at one length in one pass, round by round."""
        length = inputs.q.shape[-2]
        ready: dict[str, _Ready] = {}
        for side in self.sides:
            tell(f"{length} tokens, {part}: {side.name}")
            why = side.refusal(length, part, self.settings)
            if not why:
                try:
                    found = _prepare(side, inputs, part, self.settings)
                except Exception as error:  # a refusal, or too little memory: the others go on
                    why = _reason(error)
                else:
                    why = (
                        "" if found.rounds else f"{found.seconds:.0f} s a call: two exceed {self.settings.seconds:g} s"
                    )
                    ready.update({side.name: found} if found.rounds else {})
            if why:
                self.timings.append(Timing(side=side.name, length=length, part=part, why=why))
        tell(f"{length} tokens, {part}: {len(ready)} sides, interleaved")
        entries = list(ready.values())
        taken, disturbed = undisturbed(
            lambda: race([e.call for e in entries], [e.rounds for e in entries], [e.repeats for e in entries]), tries=1
        )
        self.disturbed = self.disturbed or disturbed
        seconds = dict(zip(ready, taken, strict=True))
        for side in self.sides:
            if side.name in ready:
                self._record(side, ready[side.name], length, part, seconds)

    def _record(self, side: _Side, entry: _Ready, length: int, part: Pass, seconds: dict[str, list[float]]) -> None:
        mine = interval(seconds[side.name])
        side.seconds.setdefault(part, []).append((length, mine.median))
        if entry.memory is not None:
            side.memory.setdefault(part, []).append((length, float(entry.memory)))
        done = Timing(side=side.name, length=length, part=part, seconds=mine, rounds=entry.rounds, memory=entry.memory)
        self.timings.append(done)
        for rival in side.rivals:
            pairs = list(zip(seconds.get(rival, []), seconds[side.name], strict=False))  # rounds that both ran
            if pairs:
                speed = interval([theirs / own for theirs, own in pairs])
                self.ratios.append(Ratio(method=side.name, against=rival, length=length, part=part, speed=speed))


class _Ready:
    """A side that is ready to race."""

    def __init__(self, run: Callable[[], object], rounds: int, seconds: float, taken: int | None, warm: bool) -> None:
        self._run, self.rounds, self.seconds, self.memory, self._warm = run, rounds, seconds, taken, warm
        self.repeats = min(max(math.ceil(_GRAIN / max(seconds, 1e-9)), 1), 20)

    def call(self) -> None:
        """Run once. Memory of a long call is taken from its first round, which saves a call."""
        if self._warm:
            self._run()
        else:
            self._warm = True
            self.memory = memory.peak_extra_bytes(self._run)
            if self.memory is None:
                self._run()


def _prepare(side: _Side, inputs: AttentionInputs, part: Pass, settings: BenchSettings) -> _Ready:
    """Build the call, warm it up and take its memory, unless it is known to be long."""
    run = side.build(inputs).call(backward=part == "forward+backward")
    seconds = side.expected(inputs.q.shape[-2], part, settings)
    if seconds is None or seconds <= _WARM_UP:
        run()
        ((seconds,),) = race([run], [1])
    rounds, short = rounds_for(seconds, settings.seconds), seconds <= _WARM_UP
    return _Ready(run, rounds, seconds, memory.peak_extra_bytes(run) if short else None, short)


def _sides(chosen: list[Method], gates: list[gate.Gate], settings: BenchSettings) -> list[_Side]:
    sides = [
        _Side(name=SDPA, build=lambda x: sdpa_work(x, torch.float32)),
        _Side(name=SDPA_BF16, build=lambda x: sdpa_work(x, torch.bfloat16)),
    ]
    if any(one.supports.projection for one in chosen):
        sides.append(_Side(name=SDPA_PROJECTION, build=sdpa_with_projection))
    for one, verdict in zip(chosen, gates, strict=True):
        why: dict[Pass, str] = {}
        if one.supports.gradient != "full":
            why["forward+backward"] = "it has no gradient for queries and keys"
        if not verdict.passed:
            why = dict.fromkeys(settings.passes, f"differs from its reference: {verdict.detail}")
        rivals = (baseline(str(one)),) if one.supports.projection else (SDPA, SDPA_BF16)
        others = [peer for peer in peers_of(one) if settings.peers and peer.version() is not None]
        names = tuple(_peer_name(peer, one) for peer in others)
        sides.append(
            _Side(name=str(one), build=_builder(one, settings.dtype), method=one, rivals=(*rivals, *names), why=why)
        )
        sides.extend(_peer_side(peer, one) for peer in others)
    return sides


def _builder(one: Method, dtype: str) -> Callable[[AttentionInputs], Workload]:
    return lambda inputs: method_work(one, inputs, state=learned_state(one, inputs), dtype=getattr(torch, dtype))


def _peer_name(peer: Peer, one: Method) -> str:
    return f"{peer.name} for {one}"


def _peer_side(peer: Peer, one: Method) -> _Side:
    why: dict[Pass, str] = {} if peer.backward else {"forward+backward": "it has no backward pass on CPUs"}
    return _Side(name=_peer_name(peer, one), build=lambda inputs: peer.build(one, inputs), method=one, why=why)


def _statuses(chosen: list[Method]) -> list[PeerStatus]:
    found = []
    for one in chosen:
        others = peers_of(one)
        if not others:
            found.append(
                PeerStatus(peer="-", method=str(one), version=None, why="no public implementation for CPUs known here")
            )
        for peer in others:
            version = peer.version()
            why = "" if version else f"not installed; run: pip install '{peer.package}', or 'sparing[peers]'"
            found.append(PeerStatus(peer=peer.name, method=str(one), version=version, why=why))
    return found


def _reason(error: Exception) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"
