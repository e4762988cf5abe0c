"""Whether the error of a fixed number of hashes grows with the length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from sparing.functional import attention
from sparing.transformers.watch import Seen
from sparing.workbench.benchmark.workload import Inputs, clustered
from sparing.workbench.estimate import exponent
from sparing_lab.report.figure import legend_below, panels, style
from sparing_lab.studies._yoso import layers, models, relative, spread, text
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HASHES = (16, 32, 64, 128)
LENGTHS: dict[str, Sequence[int]] = {"minilm": (128, 256, 512), "smollm2": (128, 256, 512, 1024, 2048)}
PAPER_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SYNTHETIC = ("clustered", "independent")
FIXED = 9  #: bits that do not grow with the length: log2 of 512
DRAWS = {"small": 2, "paper": 10}
LAYERS = {"small": 4, "paper": 12}
DRAWN = 64  #: hashes of the curves in the figure
HEADS, WIDTH = 4, 64  #: of synthetic data
NORMS = {"L-infinity": float("inf"), "L2": 2.0}
FLAT, SLOW = 0.05, 0.15  #: exponents over the length: 1.19 and 1.68 times for 32 times the length


def _cells(settings: Settings) -> list[Cell]:
    draws, many = settings.seeds or DRAWS[settings.scale], LAYERS[settings.scale]
    of = {"hashes": list(HASHES), "draws": draws}
    cells: list[Cell] = []
    for name in models(settings, "minilm", "smollm2"):
        at = {"layers": many, "text": text()[1], **of}
        for length in LENGTHS.get(name, PAPER_LENGTHS) if settings.small else PAPER_LENGTHS:
            for bits in (None, FIXED):  # one after the other: a model's layers are kept until others are asked for
                cells.append({"data": name, "trained": True, "length": length, "bits": bits, **at})
    for data in SYNTHETIC:
        for length in LENGTHS["smollm2"] if settings.small else PAPER_LENGTHS:
            cells += [{"data": data, "trained": False, "length": length, "bits": bits, **of} for bits in (None, FIXED)]
    return cells


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    if cell["trained"]:
        calls = [_first(seen, cell["length"]) for _, seen in spread(_seen(settings, cell), cell["layers"])]
    else:
        calls = [synthetic(cell["data"], cell["length"])]
    return errors(calls, cell["hashes"], cell["draws"], cell["bits"])


def _seen(settings: Settings, cell: Cell) -> tuple[Seen, ...]:
    """A causal model is run once: what its layers see of a text's first tokens does not depend on the others."""
    if cell["data"] == "smollm2":
        return layers(cell["data"], max(LENGTHS["smollm2"] if settings.small else PAPER_LENGTHS))
    return layers(cell["data"], cell["length"])


def _first(seen: Seen, length: int) -> Seen:
    query, key, value = (x[:, :, :length] for x in (seen.query, seen.key, seen.projected))
    return seen._replace(query=query, key=key, value=value)


def synthetic(data: str, length: int) -> Seen:
    """Tokens in 16 topics, of a similarity that does not change with the length, or of independent normal numbers."""
    if data == "clustered":
        inputs = clustered(1, HEADS, length, WIDTH)
    else:
        random = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, generator=random).unbind(0)
        inputs = Inputs(q=q, k=k, v=v)
    return Seen(data, inputs.q, inputs.k, inputs.v, {})


@torch.no_grad()
def errors(calls: Sequence[Seen], hashes: Sequence[int], draws: int, bits: int | None) -> list[Row]:
    """||N-YOSO - E|| / ||E||, E from the collision probability: mean over layers, heads and draws (figure 5)."""
    found: dict[tuple[int, str], list[float]] = {}
    of = "" if bits is None else f", bits={bits}"
    for seen in calls:
        wanted = _run(seen, f"yoso(expectation=True{of})", 0)
        for many in hashes:
            for seed in range(draws):
                out = _run(seen, f"yoso(hashes={many}{of})", seed)
                for name, norm in NORMS.items():
                    found.setdefault((many, name), []).extend(relative(out, wanted, norm).flatten().tolist())
    return [
        {"hash": many, **{name: sum(found[many, name]) / len(found[many, name]) for name in NORMS}} for many in hashes
    ]


def _run(seen: Seen, spec: str, seed: int) -> torch.Tensor:
    return attention(seen.query, seen.key, seen.projected, **{**seen.call, "method": spec, "seed": seed})


def _powers(rows: Rows, norm: str) -> dict[int, float]:
    """By the number of hashes: the exponent of the error over the length."""
    found = {}
    for many in HASHES:
        mine = sorted(pick(rows, hash=many), key=lambda row: row["length"])
        found[many] = exponent([row["length"] for row in mine], [row[norm] for row in mine])
    return found


def _flat(norm: str, data: str | None = None) -> Any:
    """Of the data of that name; None: of all trained models that are no presets."""

    def judge(rows: Rows) -> Judgement:
        mine = pick(rows, trained=True, bits=None) if data is None else pick(rows, data=data, bits=None)
        mine = mine if data is not None else [row for row in mine if row["data"] not in LENGTHS]
        if not mine:
            return not_run(f"{data or 'a model of up to 4096 tokens'} is not looked at here: --scale or --model")
        powers = _powers(mine, norm)
        worst = max(powers, key=lambda many: abs(powers[many]))
        ends = [min(mine, key=lambda row: row["length"])["length"], max(row["length"] for row in mine)]
        values = [pick(mine, hash=worst, length=length)[0][norm] for length in ends]
        ours = f"{values[0]:.2f} at {ends[0]}, {values[1]:.2f} at {ends[1]} tokens ({worst} hashes); exponents "
        ours += f"{min(powers.values()):+.2f} to {max(powers.values()):+.2f}"
        return judged(abs(powers[worst]) <= FLAT, abs(powers[worst]) <= SLOW, ours=ours)

    return judge


def _bits(rows: Rows) -> Judgement:
    grow = {bits: _powers(pick(rows, data="clustered", bits=bits), "L2") for bits in (None, FIXED)}
    most = {bits: max(powers.values()) for bits, powers in grow.items()}
    slower = all(grow[None][many] < grow[FIXED][many] for many in HASHES)
    ours = f"exponents up to {most[None]:+.2f} with log2(n) bits, {most[FIXED]:+.2f} with {FIXED}"
    return judged(slower and most[None] <= FLAT, slower, ours=ours)


def _hashes(rows: Rows) -> Judgement:
    powers, falls = [], True
    for row in pick(rows, trained=True, bits=None, hash=HASHES[0]):
        of = {"data": row["data"], "length": row["length"], "bits": None}
        mine = [pick(rows, **of, hash=many)[0]["L2"] for many in HASHES]
        falls = falls and all(later < earlier for earlier, later in pairwise(mine))
        powers.append(exponent([float(many) for many in HASHES], mine))
    ours = f"exponents of the L2 error over the hashes {min(powers):.2f} to {max(powers):.2f}"
    return judged(falls and all(-0.6 <= power <= -0.4 for power in powers), falls, ours=ours)


def _names(rows: Rows) -> dict[str, Rows]:
    """The curves by their names."""
    found: dict[str, Rows] = {}
    for data in dict.fromkeys(row["data"] for row in rows):
        found |= {data: pick(rows, data=data, bits=None), f"{data}, {FIXED} bits": pick(rows, data=data, bits=FIXED)}
    return found


def _tables(rows: Rows) -> list[Table]:
    lengths = sorted({row["length"] for row in rows})
    tables = []
    for norm in NORMS:
        body = []
        for name, mine in _names(rows).items():
            powers = _powers(mine, norm)
            for many in HASHES:
                values = {row["length"]: row[norm] for row in pick(mine, hash=many)}
                shown = [f"{values[length]:.3f}" if length in values else "" for length in lengths]
                body.append([name, str(many), *shown, f"{powers[many]:+.2f}"])
        tables.append(Table(f"Relative error, {norm}", ["q, k, v of", "hashes", *map(str, lengths), "exponent"], body))
    return tables


def _draw(rows: Rows, figure: Figure) -> None:
    both = panels(figure, 1, 2, size=(5.6, 4.8))
    data = list(dict.fromkeys(row["data"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    for axes, norm in zip(both, NORMS, strict=True):
        for number, name in enumerate(data):
            for bits, line, fill in ((None, "-", "full"), (FIXED, "--", "none")):
                shown = sorted(pick(rows, data=name, bits=bits, hash=DRAWN), key=lambda row: row["length"])
                label = f"{name}, {bits or 'log2(n)'} bits"
                at, values = [row["length"] for row in shown], [row[norm] for row in shown]
                axes.plot(at, values, line, label=label, fillstyle=fill, **style(number))
        title = f"{norm}, {DRAWN} hashes"
        axes.set(xscale="log", xlabel="length, tokens", ylabel="||N-YOSO - E|| / ||E||", title=title, ylim=(0, None))
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
    legend_below(figure, both[:1], 4)


_CRITERION = (
    f"exponent of the error over the length at most {FLAT} in size for every number of hashes; same shape: none above "
    f"{SLOW}"
)
_PAPER = "almost constant from 128 to 4096"
STUDY = Study(
    name="yoso-error",
    title="The error of a fixed number of hashes against the length",
    paper="yoso",
    where="figure 5, left",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("seeds", "model"),
    claims=(
        Claim(
            "paper", "figure 5", "the relative error of the pretrained model stays almost constant over the length",
            _PAPER, f"L-infinity, the authors' model or --model: {_CRITERION}", _flat("L-infinity"),
        ),
        Claim("minilm", "figure 5", "the same for MiniLM, 128 to 512 tokens, L-infinity", _PAPER, _CRITERION,
              _flat("L-infinity", "minilm"),),
        Claim("minilm-l2", "figure 5", "the same in L2", _PAPER, _CRITERION, _flat("L2", "minilm"),),
        Claim("smollm2", "figure 5", "the same for SmolLM2, causal, 128 to 2048 tokens, L-infinity", _PAPER, _CRITERION,
              _flat("L-infinity", "smollm2"),),
        Claim("smollm2-l2", "figure 5", "the same in L2", _PAPER, _CRITERION, _flat("L2", "smollm2"),),
        Claim(
            "bits", "section 6", "bits that grow as log2(n) keep the error from growing", "may be partly the cause",
            f"synthetic topics of a similarity that does not change, L2: exponents at most {FLAT} and below those with "
            f"{FIXED} bits for every number of hashes; same shape: only the latter", _bits,
        ),
        Claim(
            "independent", "figure 5", "the error of independent normal q, k, v stays almost constant, too (ours)",
            "not looked at", _CRITERION, _flat("L2", "independent"),
            ours=True,
        ),
        Claim(
            "hashes", "section 6", "the error falls with the number of hashes", "variance falls with the hashes",
            "trained models, every length, L2: falls at each step, as a power of -0.4 to -0.6; same shape: falls at "
            "each step", _hashes,
        ),
    ),
)  # fmt: skip
