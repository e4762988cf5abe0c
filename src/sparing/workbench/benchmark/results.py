"""The results of a benchmark as plain data, with crossover lengths and targets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparing.contract import method
from sparing.from_json import build
from sparing.store import verify_checksum
from sparing.workbench.benchmark.gate import Gate
from sparing.workbench.crossover import Crossover, crossover
from sparing.workbench.timing import Interval

SDPA = "SDPA float32"
SDPA_BF16 = "SDPA bfloat16"
SDPA_PROJECTION = "SDPA float32 + value projection"

Pass = Literal["forward", "forward+backward"]


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What a benchmark measures. A side is left out where two of its calls would exceed `seconds`."""

    methods: tuple[str, ...]
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    heads: int = 12
    width: int = 64
    batch: int = 1
    threads: int = 2
    seconds: float = 60.0
    backward: bool = True
    peers: bool = False
    dtype: str = "float32"  #: of the inputs of methods; SDPA is timed in float32 and bfloat16

    def __post_init__(self) -> None:
        chosen = [method(spec) for spec in self.methods]
        if not chosen:
            raise ValueError("methods is empty: name at least one, such as 'nystrom(landmarks=64)'")
        for one in chosen:
            if one.oracle:
                raise ValueError(
                    f"methods: {one.name} is an oracle, which needs the exact result; its time says nothing"
                )
        object.__setattr__(self, "methods", tuple(dict.fromkeys(str(one) for one in chosen)))
        if not self.lengths:
            raise ValueError("lengths is empty: name at least one, such as 512")
        for length in self.lengths:
            if not 2 <= length <= 2**24:
                raise ValueError(f"lengths={length} must be from 2 to {2**24} tokens")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        for name in ("heads", "width", "batch", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be a positive number of seconds")

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Forward, and forward+backward where asked."""
        return ("forward", "forward+backward") if self.backward else ("forward",)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One side (a method, SDPA, a public implementation) at one length."""

    side: str
    length: int
    part: Pass
    seconds: Interval | None = None  #: of a call; None where it was not measured
    rounds: int = 0
    memory: int | None = None  #: peak bytes beyond the inputs
    why: str = ""  #: why it was not measured


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Seconds of the other side / seconds of the method, from rounds that both took part in: above 1 it is faster."""

    method: str
    against: str
    length: int
    part: Pass
    speed: Interval


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A public implementation of a method: whether it could take part."""

    peer: str
    method: str
    version: str | None
    why: str = ""  #: why it did not


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure beside the table, a ratio."""

    name: str
    value: Interval | None
    why: str = ""  #: why there is no value
    at_least: float | None = None  #: its target
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it reaches its target; None where there is none, or no value."""
        if self.value is None or self.at_least is self.at_most is None:
            return None
        low, high = self.at_least or 0.0, math.inf if self.at_most is None else self.at_most
        return low <= self.value.median <= high


@dataclass(frozen=True, kw_only=True)
class Target:
    """The ratio that a method is meant to reach against SDPA in float32."""

    method: str
    part: Pass
    length: int
    ratio: float


def _targets(spec: str, part: Pass, **ratios: float) -> list[Target]:
    return [Target(method=spec, part=part, length=int(n[1:]), ratio=ratio) for n, ratio in ratios.items()]


TARGETS: tuple[Target, ...] = (
    *_targets("yoso(hashes=32)", "forward", n512=1.2, n1024=2, n4096=7, n16384=25),
    *_targets("yoso(hashes=32)", "forward+backward", n4096=4, n16384=15),
    *_targets("nystrom(landmarks=64)", "forward", n4096=15, n16384=60),
    *_targets("skyformer(landmarks=128)", "forward", n4096=8, n16384=30),
    *_targets("window(size=256)", "forward", n4096=8, n16384=30),
    *_targets("lsh(rounds=4)", "forward", n4096=4, n16384=15),
    *_targets("key_clusters(clusters=128, keys=256)", "forward", n4096=3, n16384=8),
    *_targets("random_features(features=256)", "forward", n4096=5, n16384=18),
    *_targets("linformer(rank=256)", "forward", n4096=6, n16384=20),
    *_targets("kernel(kind='elu')", "forward", n4096=6, n16384=20),
)
PEER_TARGET = 3.0  # against the fastest public implementation of the same method, forward
PEER_TARGET_LENGTH = 4096
TARGET_SIZES = {"batch": 1, "heads": 12, "width": 64, "threads": 2}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run."""

    settings: BenchSettings
    machine: dict[str, Any]
    inputs: str  #: what was attended to
    gates: list[Gate] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    peers: list[PeerStatus] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    duration: float = 0.0  #: seconds
    disturbed: str = ""  #: by what, if any of the times say nothing

    def gate(self, spec: str) -> Gate | None:
        return next((gate for gate in self.gates if gate.method == spec), None)

    def timing(self, side: str, length: int, part: Pass) -> Timing | None:
        return next((t for t in self.timings if (t.side, t.length, t.part) == (side, length, part)), None)

    def ratio(self, spec: str, against: str, length: int, part: Pass) -> Ratio | None:
        key = (spec, against, length, part)
        return next((r for r in self.ratios if (r.method, r.against, r.length, r.part) == key), None)

    def crossover(self, spec: str, part: Pass) -> Crossover:
        """Return the length from which a method is faster than its baseline in float32."""
        mine = [r for r in self.ratios if (r.method, r.against, r.part) == (spec, baseline(spec), part)]
        return crossover([(r.length, r.speed.median) for r in mine])

    def targets(self) -> list[Target]:
        """Return the targets that this run can judge: none for other sizes than theirs, or another type."""
        if self.settings.dtype != "float32" or any(
            getattr(self.settings, name) != size for name, size in TARGET_SIZES.items()
        ):
            return []
        chosen = self.settings
        return [
            t for t in TARGETS if t.method in chosen.methods and t.part in chosen.passes and t.length in chosen.lengths
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, from which `from_dict` makes an equal object."""
        crossovers = {
            part: {spec: self.crossover(spec, part)._asdict() for spec in self.settings.methods}
            for part in self.settings.passes
        }
        return {"format": 1, **_plain(asdict(self)), "crossovers": crossovers}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Bench:
        """Return the run that `as_dict` wrote; a ValueError names the part that is wrong."""
        if data.get("format") != 1:
            raise ValueError(f"format={data.get('format')!r} is not 1, the only one that is known")
        held = verify_checksum(data)
        derived = ("format", "crossovers")  # crossovers follow from the ratios
        return build(cls, {name: part for name, part in held.items() if name not in derived})


def baseline(spec: str) -> str:
    """Return the exact attention to compare a method with: with the value layer where the method saves its work."""
    return SDPA_PROJECTION if method(spec).supports.projection else SDPA


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
