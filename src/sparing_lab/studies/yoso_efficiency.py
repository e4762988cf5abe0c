"""Time and memory of YOSO and its rivals against self-attention, over the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparing.workbench.benchmark.workload import clustered
from sparing.workbench.timing import interval
from sparing_lab.figure import PAPER, Figure, legend_below, level, line, log_ticks, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._yoso_race import FUSED, HASHES, SELF, SPECS, race_at, timed, work_of
from sparing_lab.studies.judges import Criterion, Judge, NotRun, above, at_least, at_most, listed, within
from sparing_lab.studies.rows import Cell, Row, Rows, curve, distinct, pick, power, span
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing, pivot

TABLE = numbers("yoso", "table 4")  #: side -> length -> quantity -> value
QUANTITIES = {"forward": "Forward time", "backward": "Backward time", "cache": "Backward cache",
              "training": "Training peak", "testing": "Testing peak"}  # fmt: skip
TIMES, MEMORY = ("forward", "backward"), ("cache", "training", "testing")
LENGTHS = (512, 1024, 2048, 4096)
YOSO = tuple(f"YOSO-{m}" for m in HASHES)
RIVALS = ("Reformer-2", "Longformer-64", "Linformer-256")  #: their memory is compared with YOSO-32's in the paper
HEADS, WIDTH = 12, 64  #: as in BERT-base
LONG = (*LENGTHS, 8192, 16384, 32768, 65536)
PER_TOKEN = (128, 256, 512, 1024, 2048, 4096)
SECONDS = {"small": 4.0, "paper": 60.0}  #: for each side and pass of a race, unless two rounds take longer
NEAR = 0.8  #: share of the paper's ratio that counts as reproduced
LEAST, LINEAR, NEARLY = 0.8, 1.2, 1.5  #: limits on exponents


def _cells(settings: Settings) -> list[Cell]:
    lengths, seconds = LENGTHS if settings.small else LONG, SECONDS[settings.scale]
    of = {"heads": HEADS, "width": WIDTH, "seconds": seconds}
    return [
        *({"what": "race", "length": length, "sides": [SELF, FUSED, *SPECS], **of} for length in lengths),
        *({"what": "per token", "side": side, "lengths": list(PER_TOKEN), **of} for side in YOSO),
    ]


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    if cell["what"] == "race":
        inputs = clustered(1, cell["heads"], cell["length"], cell["width"])
        return race_at(inputs, cell["sides"], cell["seconds"])
    calls = [work_of(cell["side"], clustered(1, cell["heads"], length, cell["width"])) for length in cell["lengths"]]
    taken = timed([work.call(backward=False) for work in calls], cell["seconds"])
    return [
        {"length": length, "seconds": interval(each).median}
        for length, each in zip(cell["lengths"], taken, strict=True)
    ]


def ratio(side: str, length: int, quantity: str) -> float | None:
    """Return self-attention's / that of the side in the paper: above 1 the side takes less; None where it has none."""
    found = TABLE.get(side, {}).get(length)
    return None if found is None else TABLE[SELF][length][quantity] / found[quantity]


def _value(rows: Rows, side: str, length: int, quantity: str) -> Any:
    """Return seconds or bytes, or None if the side did not run."""
    found = pick(rows, what="race", side=side, length=length)
    return found[0].get(quantity) if found else None


def _gain(rows: Rows, side: str, length: int, quantity: str, against: str = SELF) -> float | None:
    """Return the rival's cost / the side's: above 1 the side takes less. Times are compared round by round."""
    if quantity in TIMES:
        found = _value(rows, side, length, f"{quantity} {against}")
        return None if found is None else found[0]
    theirs, mine = _value(rows, against, length, quantity), _value(rows, side, length, quantity)
    return theirs / mine if theirs and mine else None


def _power(rows: Rows, side: str, quantity: str) -> float | None:
    """Return the exponent over the paper's lengths, or None if the side did not run at one of them."""
    values = {length: _value(rows, side, length, quantity) for length in LENGTHS}
    return None if None in values.values() else power(values)


def _paper_power(side: str, quantity: str) -> float:
    return power({length: TABLE[side][length][quantity] for length in LENGTHS})


def _known(found: dict[Any, float | None]) -> dict[Any, float]:
    """Return all figures; raise NotRun if a side is missing."""
    if None in found.values():
        raise NotRun("a side could not run; the table says why")
    return {key: value for key, value in found.items() if value is not None}


def _powers(sides: Sequence[str], quantities: Sequence[str], whole: Criterion, shape: Criterion) -> Judge:
    """Judge the exponents over the length."""

    def shows(found: dict[tuple[str, str], float]) -> str:
        by = {name: span(found[side, name] for side in sides) for name in quantities}
        return listed(by, "{key} {value}", "; ")

    return Judge(lambda rows: _known({(side, name): _power(rows, side, name) for side in sides for name in quantities}),
                 whole, shape, shows, of=f"exponents over the length ({', '.join(quantities)})")  # fmt: skip


def _paper_powers(sides: Sequence[str], quantities: Sequence[str]) -> str:
    found = {name: span(_paper_power(side, name) for side in sides) for name in quantities}
    return "exponents by table 4: " + listed(found, "{key} {value}", "; ")


def _gains(rows: Rows, length: int, quantities: Sequence[str], against: str = SELF) -> dict[Any, float]:
    return _known({(side, name): _gain(rows, side, length, name, against) for side in YOSO for name in quantities})


def _listed(found: dict[Any, float | None] | dict[Any, float], quantities: Sequence[str]) -> str:
    return "; ".join(f"{name} " + " / ".join(f"{found[side, name]:.1f}" for side in YOSO) for name in quantities)


def _paper_gains(quantities: Sequence[str]) -> str:
    found = {(side, name): ratio(side, 4096, name) for side in YOSO for name in quantities}
    return f"YOSO-16 / 32 / 64 / 128: {_listed(found, quantities)}"


def _as_much(quantities: Sequence[str]) -> Judge:
    """Judge whether 4096 tokens save as much as in the paper; same shape: there is a gain that grows with length."""

    def enough(found: dict[int, dict[Any, float]]) -> bool:
        return all(value >= NEAR * (ratio(side, 4096, name) or 0.0) for (side, name), value in found[4096].items())

    def grows(found: dict[int, dict[Any, float]]) -> bool:
        return all(value > max(1.0, found[512][key]) for key, value in found[4096].items())

    return Judge(
        lambda rows: {length: _gains(rows, length, quantities) for length in (512, 4096)},
        Criterion(f"at least {NEAR} of the paper's", enough), Criterion("above 1, and more than at 512", grows),
        lambda found: _listed(found[4096], quantities),
        of="self-attention with its matrix / YOSO at 4096 tokens, for every number of hashes",
    )  # fmt: skip


def _per_token(rows: Rows, side: str) -> dict[int, float]:
    """Return microseconds per token, by length."""
    return curve(pick(rows, what="per token", side=side), "length", lambda row: row["seconds"] / row["length"] * 1e6)


def _kept(rows: Rows) -> dict[str, float]:
    return _known({rival: _gain(rows, "YOSO-32", 512, "cache", rival) for rival in RIVALS})


_PAPER_KEPT = {rival: TABLE[rival][512]["cache"] / TABLE["YOSO-32"][512]["cache"] for rival in RIVALS}


def _shares(rows: Rows) -> dict[str, float]:
    """Return forward time of YOSO-32 / that of each rival, at 4096 tokens."""
    found = _known({side: _value(rows, side, 4096, "forward") for side in ("YOSO-32", *RIVALS)})
    return {rival: found["YOSO-32"] / found[rival] for rival in RIVALS}


def _over_hashes(rows: Rows) -> dict[str, float]:
    """Return the exponents over the number of hashes of the times at 4096 tokens."""
    return {part: power(_known({m: _value(rows, f"YOSO-{m}", 4096, part) for m in HASHES})) for part in TIMES}


def _tables(rows: Rows) -> list[Table]:
    lengths = sorted(distinct(pick(rows, what="race"), "length"))

    def absolute(value: float | None, name: str) -> str:
        return "-" if value is None else f"{value * 1e3:.1f} ms" if name in TIMES else f"{value / 2**20:.0f} MiB"

    def beside(ours: float | None, paper: float | None) -> str:
        return _number(ours) + ("" if paper is None else f" ({paper:.2f})")

    def gains(name: str, title: str) -> Table:
        def entry(side: str, length: int) -> str:
            if side == SELF:
                return absolute(_value(rows, SELF, length, name), name)
            return beside(_gain(rows, side, length, name), ratio(side, length, name))

        title = f"{title}: self-attention (n x n matrix) / side (paper's ratio)"
        return pivot(title, "side", [SELF, FUSED, *SPECS], lengths, entry)

    refused = [row for row in pick(rows, what="race") if row["why"]]
    return [
        *(gains(name, title) for name, title in QUANTITIES.items()),
        pivot("Time of fused attention (SDPA) / the side, forward / backward", "side", SPECS, lengths,
              lambda side, n: " / ".join(_number(_gain(rows, side, n, part, FUSED)) for part in TIMES)),
        pivot("Exponents over 512 to 4096 tokens (the paper's)", "side", [SELF, FUSED, *SPECS], list(QUANTITIES),
              lambda side, name: beside(_power(rows, side, name), _paper_power(side, name) if side in TABLE else None)),
        pivot("Forward time per token, microseconds", "side", YOSO, PER_TOKEN,
              lambda side, n: f"{_per_token(rows, side)[n]:.1f}"),
        *([listing("Not run", refused, {"side": "{side}", "tokens": "{length}", "why": "{why}"})] if refused else []),
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(5.2, 4.6))
    lengths = sorted(distinct(pick(rows, what="race"), "length"))
    for number, side in enumerate((*YOSO, *RIVALS, FUSED)):
        look = {**style(number), **({"color": "black", "linestyle": "--"} if side == FUSED else {})}
        if side in YOSO:
            line(left, _per_token(rows, side), side, number)
        for axes, quantity in ((middle, "forward"), (right, "cache")):
            line(axes, {n: gain for n in lengths if (gain := _gain(rows, side, n, quantity)) is not None}, side, **look)
            if side in YOSO:
                axes.plot(LENGTHS, [ratio(side, n, quantity) for n in LENGTHS], **{
                    **PAPER, "label": "paper, YOSO" if number == 0 else None, "color": look["color"]})  # fmt: skip
    left.set(ylabel="forward time per token, microseconds", title="Time per token (figure 5, right)", ylim=(0, None))
    middle.set(ylabel="time of self-attention / time of the side", title="Forward time (table 4)", yscale="log")
    right.set(ylabel="cache of self-attention / cache of the side", title="Backward cache (table 4)", yscale="log")
    for axes in (left, middle, right):
        axes.set(xlabel="length, tokens")
        log_ticks(axes, PER_TOKEN if axes is left else lengths)
    for axes in (middle, right):
        level(axes, 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.legend()
    legend_below(figure, [middle], 5)


STUDY = Study(
    name="yoso-efficiency", title="Time and memory of YOSO and others against self-attention, over the length",
    paper="yoso", where="tables 1 and 4, figure 5, right", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    timed=True, claims=(
        Claim("quadratic", "table 1", "self-attention takes time and memory of order n^2",
              _paper_powers((SELF,), list(QUANTITIES)),
              judge=_powers((SELF,), list(QUANTITIES), within(1.7, 2.3), within(1.5, 2.5))),
        Claim("linear-time", "table 1", "YOSO takes time linear in the length, forward and backward",
              _paper_powers(YOSO, TIMES), judge=_powers(YOSO, TIMES, within(LEAST, LINEAR), within(0.0, NEARLY))),
        Claim("linear-memory", "table 1", "YOSO takes memory linear in the length", _paper_powers(YOSO, MEMORY),
              judge=_powers(YOSO, MEMORY, within(LEAST, LINEAR), within(0.0, NEARLY))),
        Claim("hashes", "table 1", "time is at most in proportion to the number of hashes",
              "0.69 forward, 0.66 backward by table 4", judge=Judge(
                  _over_hashes, at_most(1.1), at_most(1.3), lambda found: "exponents over the hashes at 4096 tokens: "
                  + listed(found, "{key} {value:.2f}"), of="exponents over the hashes")),
        Claim("short", "section 6", "at 512 tokens YOSO's runtime is similar to self-attention's",
              "YOSO-32: forward 0.85, backward 0.73 times as fast", judge=Judge(
                  lambda rows: _known({part: _gain(rows, "YOSO-32", 512, part) for part in TIMES}),
                  within(0.5, 2), at_least(0.5), "{key} {value:.2f}", of="times as fast, forward and backward")),
        Claim("speed", "table 4", "at 4096 tokens YOSO is faster than self-attention", _paper_gains(TIMES),
              judge=_as_much(TIMES)),
        Claim("fused", "table 4", "it is faster than fused attention, too (ours)", "not compared", judge=Judge(
            lambda rows: _gains(rows, 4096, TIMES, FUSED), above(1), above(1).once(),
            lambda found: f"YOSO-16 / 32 / 64 / 128: {_listed(found, TIMES)}",
            of="SDPA / YOSO at 4096 tokens, forward and backward, for each number of hashes"), ours=True),
        Claim("cache", "table 4", "at 4096 tokens YOSO keeps less for the backward pass", _paper_gains(["cache"]),
              judge=_as_much(["cache"])),
        Claim("peak", "table 4", "it takes less memory in training and testing", _paper_gains(MEMORY[1:]),
              judge=_as_much(MEMORY[1:])),
        Claim("others-cache", "section 6", "YOSO-32 keeps less for the backward pass than the other methods",
              "2.6x (Reformer-2), 1.9x (Longformer-64), 2.1x (Linformer-256) at 512 tokens", judge=Judge(
                  _kept, Criterion(f"at least {NEAR} of the paper's",
                                   lambda found: all(found[key] >= NEAR * _PAPER_KEPT[key] for key in found)),
                  above(1.05), "{value:.2f}x ({key})", of="theirs / YOSO-32's at 512 tokens")),
        Claim("others-time", "section 6", "YOSO-32 saves about as much time as the other methods",
              "its time / theirs at 4096: 0.99 (Reformer-2), 1.02 (Longformer-64), 1.57 (Linformer-256)",
              judge=Judge(_shares, within(0.5, 2), within(0.5, 2).once(), "{value:.2f} ({key})",
                          of="its forward time / theirs")),
        Claim("per-token", "figure 5", "time per token grows by 30 % from 128 to 4096 tokens", "1.3x", judge=Judge(
            lambda rows: {side: (found := _per_token(rows, side))[4096] / found[128] for side in YOSO},
            within(1 / 1.3, 1.3), at_most(2), "{key} {value:.2f}x", of="growth for every number of hashes")),
    ),
)  # fmt: skip
