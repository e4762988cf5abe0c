"""Time and memory of YOSO and its rivals against self-attention, over the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparing.workbench.benchmark.workload import clustered
from sparing.workbench.estimate import exponent
from sparing.workbench.timing import interval
from sparing_lab.report.figure import PAPER, legend_below, panels, style
from sparing_lab.studies._yoso_race import FUSED, HASHES, SELF, SPECS, race_at, timed, work_of
from sparing_lab.studies._yoso_table4 import LENGTHS, QUANTITIES, TABLE, ratio
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

YOSO = tuple(f"YOSO-{m}" for m in HASHES)
RIVALS = ("Reformer-2", "Longformer-64", "Linformer-256")  #: whose memory the paper sets beside YOSO-32's
HEADS, WIDTH = 12, 64  #: of BERT-base
LONG = (*LENGTHS, 8192, 16384, 32768, 65536)
PER_TOKEN = (128, 256, 512, 1024, 2048, 4096)
SECONDS = {"small": 4.0, "paper": 60.0}  #: for each side and pass of a race, unless two rounds take longer
NEAR = 0.8  #: of the paper's ratio is as good as it
LEAST, LINEAR, NEARLY = 0.8, 1.2, 1.5  #: exponents


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


def _value(rows: Rows, side: str, length: int, quantity: str) -> float | None:
    """Seconds or bytes; None where the side did not run."""
    found = pick(rows, what="race", side=side, length=length)
    return found[0].get(quantity) if found else None


def _gain(rows: Rows, side: str, length: int, quantity: str, against: str = SELF) -> float | None:
    """That of the rival / that of the side: above 1 the side takes less. Times are compared round by round."""
    if quantity in ("forward", "backward"):
        found = _value(rows, side, length, f"{quantity} {against}")
        return None if found is None else found[0]  # type: ignore[index]
    theirs, mine = _value(rows, against, length, quantity), _value(rows, side, length, quantity)
    return None if not theirs or not mine else theirs / mine


def _lengths(rows: Rows) -> list[int]:
    return sorted({row["length"] for row in pick(rows, what="race")})


def _power(rows: Rows, side: str, quantity: str) -> float | None:
    """The exponent over the paper's lengths; None where the side did not run at all of them."""
    values = [_value(rows, side, length, quantity) for length in LENGTHS]
    return (
        None if None in values else exponent([float(n) for n in LENGTHS], [float(x) for x in values if x is not None])
    )


def _paper_power(side: str, quantity: str) -> float:
    return exponent([float(n) for n in LENGTHS], [TABLE[side][n][quantity] for n in LENGTHS])


_NOTHING = "a side could not run; the table says why"


def _span(values: Sequence[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _powers(
    sides: Sequence[str], quantities: Sequence[str], low: float, high: float, shape: tuple[float, float]
) -> Any:
    """All exponents from `low` to `high`; same shape: from and to these."""

    def judge(rows: Rows) -> Judgement:
        found = {name: [_power(rows, side, name) for side in sides] for name in quantities}
        values = [value for each in found.values() for value in each]
        if any(value is None for value in values):
            return not_run(_NOTHING)
        ours = "; ".join(f"{name} {_span([x for x in each if x is not None])}" for name, each in found.items())
        whole = all(value is not None and low <= value <= high for value in values)
        near = all(value is not None and shape[0] <= value <= shape[1] for value in values)
        return judged(whole, near, ours=ours)

    return judge


def _paper_powers(sides: Sequence[str], quantities: Sequence[str]) -> str:
    shown = (f"{name} {_span([_paper_power(side, name) for side in sides])}" for name in quantities)
    return "exponents by table 4: " + "; ".join(shown)


def _hashes(rows: Rows) -> Judgement:
    found: list[float] = []
    for part in ("forward", "backward"):
        values = [_value(rows, side, 4096, part) for side in YOSO]
        if None in values:
            return not_run(_NOTHING)
        found.append(exponent([float(m) for m in HASHES], [float(x) for x in values if x is not None]))
    ours = f"exponents over the hashes at 4096 tokens: forward {found[0]:.2f}, backward {found[1]:.2f}"
    return judged(max(found) <= 1.1, max(found) <= 1.3, ours=ours)


def _gains(rows: Rows, length: int, quantities: Sequence[str]) -> dict[tuple[str, str], float] | None:
    found = {(side, name): _gain(rows, side, length, name) for side in YOSO for name in quantities}
    known = {key: value for key, value in found.items() if value is not None}
    return known if len(known) == len(found) else None


def _shown(found: dict[tuple[str, str], float], quantities: Sequence[str]) -> str:
    return "; ".join(f"{name} " + " / ".join(f"{found[side, name]:.1f}" for side in YOSO) for name in quantities)


def _paper_gains(length: int, quantities: Sequence[str]) -> str:
    found = {(side, name): ratio(side, length, name) or 0.0 for side in YOSO for name in quantities}
    return f"YOSO-16 / 32 / 64 / 128: {_shown(found, quantities)}"


def _as_much(quantities: Sequence[str]) -> Any:
    """At 4096 tokens as much is saved as in the paper; same shape: there is a gain, and it grows with the length."""

    def judge(rows: Rows) -> Judgement:
        short, long = (_gains(rows, length, quantities) for length in (512, 4096))
        if short is None or long is None:
            return not_run(_NOTHING)
        whole = all(value >= NEAR * (ratio(side, 4096, name) or 0.0) for (side, name), value in long.items())
        shape = all(value > max(1.0, short[key]) for key, value in long.items())
        return judged(whole, shape, ours=_shown(long, quantities))

    return judge


def _short(rows: Rows) -> Judgement:
    values = [_gain(rows, "YOSO-32", 512, part) for part in ("forward", "backward")]
    if None in values:
        return not_run(_NOTHING)
    known = [value for value in values if value is not None]
    ours = f"forward {known[0]:.2f}, backward {known[1]:.2f}"
    return judged(all(0.5 <= value <= 2 for value in known), all(value >= 0.5 for value in known), ours=ours)


def _fused(rows: Rows) -> Judgement:
    found = {(s, p): _gain(rows, s, 4096, p, FUSED) for s in YOSO for p in ("forward", "backward")}
    known = {key: value for key, value in found.items() if value is not None}
    if len(known) < len(found):
        return not_run(_NOTHING)
    ours = "YOSO-16 / 32 / 64 / 128: " + _shown(known, ("forward", "backward"))
    return judged(all(value > 1 for value in known.values()), any(value > 1 for value in known.values()), ours=ours)


def _less_kept(rows: Rows) -> Judgement:
    found = [_gain(rows, "YOSO-32", 512, "cache", rival) for rival in RIVALS]
    if None in found:
        return not_run(_NOTHING)
    known = [value for value in found if value is not None]
    wanted = [TABLE[rival][512]["cache"] / TABLE["YOSO-32"][512]["cache"] for rival in RIVALS]
    whole = all(value >= NEAR * paper for value, paper in zip(known, wanted, strict=True))
    ours = ", ".join(f"{value:.2f}x ({rival})" for value, rival in zip(known, RIVALS, strict=True))
    return judged(whole, all(value > 1.05 for value in known), ours=ours)


def _similar(rows: Rows) -> Judgement:
    mine = [_value(rows, side, 4096, "forward") for side in ("YOSO-32", *RIVALS)]
    if None in mine:
        return not_run(_NOTHING)
    known = [float(value) for value in mine if value is not None]
    shares = [known[0] / other for other in known[1:]]
    ours = ", ".join(f"{share:.2f} ({rival})" for share, rival in zip(shares, RIVALS, strict=True))
    near = [0.5 <= share <= 2 for share in shares]
    return judged(all(near), any(near), ours=ours)


def _per_token(rows: Rows) -> Judgement:
    growth = {}
    for side in YOSO:
        found = {row["length"]: row["seconds"] / row["length"] for row in pick(rows, what="per token", side=side)}
        growth[side] = found[PER_TOKEN[-1]] / found[PER_TOKEN[0]]
    ours = ", ".join(f"{side} {value:.2f}x" for side, value in growth.items())
    near = all(1 / 1.3 <= value <= 1.3 for value in growth.values())
    return judged(near, max(growth.values()) <= 2, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    lengths, sides = _lengths(rows), [FUSED, *SPECS]
    words = dict(
        zip(
            QUANTITIES,
            ("Forward time", "Backward time", "Backward cache", "Training peak", "Testing peak"),
            strict=True,
        )
    )
    tables = []
    for name, title in words.items():
        body = [[side, *(_entry(rows, side, length, name) for length in lengths)] for side in sides]
        first = [SELF, *(_absolute(_value(rows, SELF, length, name), name) for length in lengths)]
        title = f"{title}: self-attention (n x n matrix) / side (paper's ratio)"
        tables.append(Table(title, ["side", *map(str, lengths)], [first, *body]))
    fused = [
        [
            side,
            *(
                " / ".join(_number(_gain(rows, side, n, part, FUSED)) for part in ("forward", "backward"))
                for n in lengths
            ),
        ]
        for side in SPECS
    ]
    tables.append(
        Table("Time of fused attention (SDPA) / the side, forward / backward", ["side", *map(str, lengths)], fused)
    )
    body = [
        [side, *(f"{_number(_power(rows, side, name))}{_beside(side, name)}" for name in QUANTITIES)]
        for side in [SELF, FUSED, *SPECS]
    ]
    tables.append(Table("Exponents over 512 to 4096 tokens (the paper's)", ["side", *QUANTITIES], body))
    per = [
        [side, *(f"{row['seconds'] / row['length'] * 1e6:.1f}" for row in pick(rows, what="per token", side=side))]
        for side in YOSO
    ]
    tables.append(Table("Forward time per token, microseconds", ["side", *map(str, PER_TOKEN)], per))
    refused = [[row["side"], str(row["length"]), row["why"]] for row in pick(rows, what="race") if row["why"]]
    return tables + ([Table("Not run", ["side", "tokens", "why"], refused)] if refused else [])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _absolute(value: float | None, quantity: str) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if quantity in ("forward", "backward") else f"{value / 2**20:.0f} MiB"


def _entry(rows: Rows, side: str, length: int, quantity: str) -> str:
    paper = ratio(side, length, quantity)
    return _number(_gain(rows, side, length, quantity)) + ("" if paper is None else f" ({paper:.2f})")


def _beside(side: str, quantity: str) -> str:
    return f" ({_paper_power(side, quantity):.2f})" if side in TABLE else ""


def _draw(rows: Rows, figure: Figure) -> None:
    left, middle, right = panels(figure, 1, 3, size=(5.2, 4.6))
    for number, side in enumerate(YOSO):
        mine = pick(rows, what="per token", side=side)
        left.plot([row["length"] for row in mine], [row["seconds"] / row["length"] * 1e6 for row in mine], label=side,
                  **style(number))  # fmt: skip
    left.set(ylabel="forward time per token, microseconds", title="Time per token (figure 5, right)", ylim=(0, None))
    lengths = _lengths(rows)
    marked = False
    for number, side in enumerate((*YOSO, *RIVALS, FUSED)):
        look = {**style(number), **({"color": "black", "linestyle": "--"} if side == FUSED else {})}
        for axes, quantity in ((middle, "forward"), (right, "cache")):
            known = {n: gain for n in lengths if (gain := _gain(rows, side, n, quantity)) is not None}
            axes.plot(list(known), list(known.values()), label=side, **look)
            if side in YOSO:
                label = "paper, YOSO" if not marked else None
                axes.plot(LENGTHS, [ratio(side, n, quantity) for n in LENGTHS], **{**PAPER, "label": label,
                          "color": look["color"]})  # fmt: skip
        marked = True
    middle.set(ylabel="time of self-attention / time of the side", title="Forward time (table 4)", yscale="log")
    right.set(ylabel="cache of self-attention / cache of the side", title="Backward cache (table 4)", yscale="log")
    for axes in (left, middle, right):
        ticks = PER_TOKEN if axes is left else lengths
        axes.set(xscale="log", xlabel="length, tokens")
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
    for axes in (middle, right):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.legend()
    legend_below(figure, [middle], 5)


_TIMES, _MEMORY = ("forward", "backward"), ("cache", "training", "testing")
STUDY = Study(
    name="yoso-efficiency",
    title="Time and memory of YOSO and others against self-attention, over the length",
    paper="yoso",
    where="tables 1 and 4, figure 5, right",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    timed=True,
    claims=(
        Claim(
            "quadratic", "table 1", "self-attention takes time and memory of order n^2",
            _paper_powers((SELF,), QUANTITIES),
            "exponents from 1.7 to 2.3, with the matrix of weights in memory; same shape: 1.5 to 2.5",
            _powers((SELF,), QUANTITIES, 1.7, 2.3, (1.5, 2.5)),
        ),
        Claim(
            "linear-time", "table 1", "YOSO takes time linear in the length, forward and backward",
            _paper_powers(YOSO, _TIMES),
            f"exponents {LEAST} to {LINEAR} for every number of hashes; same shape: at most {NEARLY}",
            _powers(YOSO, _TIMES, LEAST, LINEAR, (0.0, NEARLY)),
        ),
        Claim(
            "linear-memory", "table 1", "YOSO takes memory linear in the length", _paper_powers(YOSO, _MEMORY),
            f"exponents {LEAST} to {LINEAR} for every number of hashes; same shape: at most {NEARLY}",
            _powers(YOSO, _MEMORY, LEAST, LINEAR, (0.0, NEARLY)),
        ),
        Claim(
            "hashes", "table 1", "time is at most in proportion to the number of hashes",
            "0.69 forward, 0.66 backward by table 4", "exponents over the hashes at most 1.1; same shape: 1.3", _hashes,
        ),
        Claim(
            "short", "section 6", "at 512 tokens YOSO's runtime is similar to self-attention's",
            "YOSO-32: forward 0.85, backward 0.73 times as fast", "from half to twice as fast; same shape: at least "
            "half as fast", _short,
        ),
        Claim(
            "speed", "table 4", "at 4096 tokens YOSO is faster than self-attention", _paper_gains(4096, _TIMES),
            f"self-attention with its matrix / YOSO at least {NEAR} of the paper's for each; same shape: above 1, and "
            "more than at 512", _as_much(_TIMES),
        ),
        Claim(
            "fused", "table 4", "it is faster than fused attention, too (ours)", "not compared",
            "above 1 against SDPA at 4096 tokens, forward and backward, for each number of hashes; same shape: for one",
            _fused,
            ours=True,
        ),
        Claim(
            "cache", "table 4", "at 4096 tokens YOSO keeps less for the backward pass", _paper_gains(4096, ("cache",)),
            f"at least {NEAR} of the paper's ratio for each; same shape: above 1, and more than at 512",
            _as_much(("cache",)),
        ),
        Claim(
            "peak", "table 4", "it takes less memory in training and testing",
            _paper_gains(4096, ("training", "testing")),
            f"at least {NEAR} of the paper's ratio for each; same shape: above 1, and more than at 512",
            _as_much(("training", "testing")),
        ),
        Claim(
            "others-cache", "section 6", "YOSO-32 keeps less for the backward pass than the other methods",
            "2.6x (Reformer-2), 1.9x (Longformer-64), 2.1x (Linformer-256) at 512 tokens",
            f"at least {NEAR} of these; same shape: above 1.05", _less_kept,
        ),
        Claim(
            "others-time", "section 6", "YOSO-32 saves about as much time as the other methods",
            "its time / theirs at 4096: 0.99 (Reformer-2), 1.02 (Longformer-64), 1.57 (Linformer-256)",
            "from half to twice their forward time; same shape: of one", _similar,
        ),
        Claim(
            "per-token", "figure 5", "time per token grows by 30 % from 128 to 4096 tokens", "1.3x",
            "1 / 1.3 to 1.3 times for every number of hashes; same shape: at most 2", _per_token,
        ),
    ),
)  # fmt: skip
