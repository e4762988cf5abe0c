"""Whether the error of a fixed number of hashes grows with the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparing.functional import attention
from sparing.transformers.watch import ObservedCall
from sparing_lab.figure import Figure, legend_below, line, log_ticks, panels
from sparing_lab.studies._yoso import bits_of, layers, models, relative, spread, text
from sparing_lab.studies.judges import Judge, NotRun, at_most, each, exponent, falls
from sparing_lab.studies.rows import Cell, Row, Rows, curve, curves, distinct, pick, power, span
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot, shown

HASHES = (16, 32, 64, 128)
LENGTHS: dict[str, Sequence[int]] = {"minilm": (128, 256, 512), "smollm2": (128, 256, 512, 1024, 2048)}
PAPER_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
#: Synthetic data: by name, the cosine of a query and its own topic's keys; 0 for independent normal numbers.
SYNTHETIC = {"topics, cosine 0.9": 0.9, "topics, cosine 0.7": 0.7, "topics, cosine 0.5": 0.5, "independent": 0.0}
TOPICS = 16
FIXED = 9  #: bits that do not grow with the length: log2 of 512
MODEL = "model"  #: the bits that the model runs at any length, log2 of the longest input that it is made for
DRAWS = {"small": 2, "paper": 10}
LAYERS = {"small": 4, "paper": 12}
DRAWN = 64  #: number of hashes of the curves in the figure
NAMES = {None: ", log2(n) bits", FIXED: f", {FIXED} bits", MODEL: ", its bits"}
HEADS, WIDTH = 4, 64  #: shape of synthetic data
NORMS = {"L-infinity": float("inf"), "L2": 2.0}
FLAT, SLOW = 0.05, 0.15  #: exponents over the length: 1.19 and 1.68 times for 32 times the length


def _cells(settings: Settings) -> list[Cell]:
    draws, many = settings.seeds or DRAWS[settings.scale], LAYERS[settings.scale]
    of = {"hashes": list(HASHES), "draws": draws}
    cells: list[Cell] = []
    for name in models(settings, "minilm", "smollm2"):
        at = {"layers": many, "text": text()[1], **of}
        for length in LENGTHS.get(name, PAPER_LENGTHS) if settings.small else PAPER_LENGTHS:
            for bits in (MODEL, None):  # one after the other: a model's layers are kept until others are asked for
                cells.append({"data": name, "trained": True, "length": length, "bits": bits, **at})
    for data in SYNTHETIC:
        for length in LENGTHS["smollm2"] if settings.small else PAPER_LENGTHS:
            cells += [{"data": data, "trained": False, "length": length, "bits": bits, **of} for bits in (None, FIXED)]
    return cells


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    if cell["trained"]:
        calls = [
            seen._replace(query=q, key=k, value=v) for _, seen in spread(_seen(settings, cell), cell["layers"])
            for q, k, v in [(x[:, :, : cell["length"]] for x in (seen.query, seen.key, seen.projected))]
        ]  # fmt: skip
    else:
        calls = [synthetic(SYNTHETIC[cell["data"]], cell["length"])]
    bits = bits_of(calls[0]) if cell["bits"] == MODEL else cell["bits"]
    return errors(calls, cell["hashes"], cell["draws"], bits)


def _seen(settings: Settings, cell: Cell) -> tuple[ObservedCall, ...]:
    """Return the layers' inputs; a causal model is run once, as its first tokens do not depend on later ones."""
    if cell["data"] == "smollm2":
        return layers(cell["data"], max(LENGTHS["smollm2"] if settings.small else PAPER_LENGTHS))
    return layers(cell["data"], cell["length"])


def synthetic(cosine: float, length: int) -> ObservedCall:
    """Return tokens in TOPICS topics, whose similarity does not depend on the length.

    cosine: of a query and a key of its topic, in the mean; 0: all are independent.
    """
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, length, WIDTH, generator=random).unbind(0)
    topics = torch.randn(1, HEADS, TOPICS, WIDTH, generator=random)
    mine = topics[:, :, torch.randint(TOPICS, (length,), generator=random)]
    q, k = (cosine**0.5 * mine + (1 - cosine) ** 0.5 * x for x in (q, k))
    return ObservedCall("synthetic", q, k, v, {})


@torch.no_grad()
def errors(calls: Sequence[ObservedCall], hashes: Sequence[int], draws: int, bits: int | None) -> list[Row]:
    """Return ||N-YOSO - E|| / ||E||, E from the collision probability: mean over layers, heads and draws (figure 5)."""
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


def _run(seen: ObservedCall, spec: str, seed: int) -> torch.Tensor:
    return attention(seen.query, seen.key, seen.projected, **{**seen.call, "method": spec, "seed": seed})


def _powers(rows: Rows, norm: str) -> dict[int, float]:
    """Return the exponent of the error over the length, by the number of hashes."""
    return {many: power(curve(pick(rows, hash=many), "length", norm)) for many in HASHES}


def _flat(norm: str, data: str | None = None) -> Judge:
    """Judge whether the error on that data is flat; None: on all trained models that are not presets."""

    def figures(rows: Rows) -> dict[str, Any]:
        bits = None if data in SYNTHETIC else MODEL
        mine = pick(rows, trained=True, bits=bits) if data is None else pick(rows, data=data, bits=bits)
        mine = mine if data is not None else [row for row in mine if row["data"] not in LENGTHS]
        if not mine:
            raise NotRun(f"{data or 'a model of up to 4096 tokens'} is not looked at here: --scale or --model")
        powers = _powers(mine, norm)
        worst = max(powers, key=lambda many: abs(powers[many]))
        return {"powers": powers, "worst": worst, "size": abs(powers[worst]),
                "errors": curve(pick(mine, hash=worst), "length", norm)}  # fmt: skip

    def shows(found: dict[str, Any]) -> str:
        (first, *_), (last, *_) = found["errors"].items(), reversed(found["errors"].items())
        powers = found["powers"].values()
        return (
            f"{first[1]:.2f} at {first[0]}, {last[1]:.2f} at {last[0]} tokens ({found['worst']} hashes); exponents "
            f"{min(powers):+.2f} to {max(powers):+.2f}"
        )

    about = f"{norm}: size of the exponent of the error over the length, for every number of hashes"
    return Judge(figures, at_most(FLAT).of("size"), at_most(SLOW).of("size"), shows, of=about)


def _similarities(rows: Rows) -> dict[str, dict[Any, float]]:
    """Return the largest exponents of the L2 error over the length, for data in topics and each choice of bits."""
    return {
        data: {bits: max(_powers(pick(rows, data=data, bits=bits), "L2").values()) for bits in (None, FIXED)}
        for data, cosine in SYNTHETIC.items() if cosine
    }  # fmt: skip


_FLAT = each(f"at most {FLAT:g} with log2(n) bits", lambda found: found[None] <= FLAT)
_SLOWER = each(f"below those with {FIXED} bits", lambda found: found[None] < found[FIXED])


def _tables(rows: Rows) -> list[Table]:
    lengths = sorted(distinct(rows, "length"))
    named: dict[str, list[Row]] = {}
    for data in distinct(rows, "data"):
        for bits in distinct(pick(rows, data=data), "bits"):
            named[f"{data}{NAMES[bits]}"] = pick(rows, data=data, bits=bits)

    def table(norm: str) -> Table:
        def entry(line: tuple[str, int], column: Any) -> str:
            errors = curve(pick(named[line[0]], hash=line[1]), "length", norm)
            return f"{power(errors):+.2f}" if column == "exponent" else shown(errors.get(column), ".3f")

        lines = [(name, many) for name in named for many in HASHES]
        title = f"Relative error, {norm}"
        return pivot(title, ["q, k, v of", "hashes"], lines, [*lengths, "exponent"], entry, lambda x: [x[0], str(x[1])])

    return [table(norm) for norm in NORMS]


def _draw(rows: Rows, figure: Figure) -> None:
    both = panels(figure, 1, 2, size=(5.6, 4.8))
    for axes, norm in zip(both, NORMS, strict=True):
        for number, name in enumerate(distinct(rows, "data")):
            for bits, (dash, fill) in {None: ("-", "full"), FIXED: ("--", "none"), MODEL: ("--", "none")}.items():
                if found := curve(pick(rows, data=name, bits=bits, hash=DRAWN), "length", norm):
                    line(axes, found, f"{name}{NAMES[bits]}", number, linestyle=dash, fillstyle=fill)
        log_ticks(axes, sorted(distinct(rows, "length")))
        title = f"{norm}, {DRAWN} hashes"
        axes.set(xlabel="length, tokens", ylabel="||N-YOSO - E|| / ||E||", title=title, ylim=(0, None))
    legend_below(figure, both[:1], 4)


_PAPER = "almost constant from 128 to 4096"
STUDY = Study(
    name="yoso-error", title="The error of a fixed number of hashes against the length", paper="yoso",
    where="figure 5, left", cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("seeds", "model"),
    claims=(
        Claim("paper", "figure 5", "the relative error of the pretrained model stays almost constant over the length",
              _PAPER, judge=_flat("L-infinity")),
        Claim("minilm", "figure 5", "the same for MiniLM, 128 to 512 tokens, L-infinity", _PAPER,
              judge=_flat("L-infinity", "minilm")),
        Claim("minilm-l2", "figure 5", "the same for MiniLM in L2", _PAPER, judge=_flat("L2", "minilm")),
        Claim("smollm2", "figure 5", "the same for a causal language model, SmolLM2, 128 to 2048 tokens, L-infinity",
              "not looked at", judge=_flat("L-infinity", "smollm2"), ours=True),
        Claim("smollm2-l2", "figure 5", "the same for SmolLM2 in L2", "not looked at", judge=_flat("L2", "smollm2"),
              ours=True),
        Claim("bits", "section 6", "bits that grow as log2(n) keep the error from growing", "may be partly the cause",
              judge=Judge(
                  _similarities, _FLAT & _SLOWER, _SLOWER.once("for one similarity"),
                  lambda found: f"with log2(n) bits, with {FIXED}: " + "; ".join(
                      f"{data} {powers[None]:+.2f}, {powers[FIXED]:+.2f}" for data, powers in found.items()),
                  of="largest exponent of the L2 error over the length for any number of hashes, synthetic topics of "
                  "three similarities that do not change")),
        Claim("independent", "figure 5", "the error of independent normal q, k, v stays almost constant, too (ours)",
              "not looked at", judge=_flat("L2", "independent"), ours=True),
        Claim("hashes", "section 6", "the error falls with the number of hashes", "variance falls with the hashes",
              judge=Judge(
                  lambda rows: curves(pick(rows, trained=True, bits=MODEL), "hash", "L2", "data", "length"),
                  falls() & exponent(-0.6, -0.4), falls(),
                  lambda found: f"exponents of the L2 error over the hashes {span(map(power, found.values()))}",
                  of="L2 error over the hashes, trained models, every length")),
    ),
)  # fmt: skip
