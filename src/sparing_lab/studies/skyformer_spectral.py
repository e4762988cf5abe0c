"""How far approximate attention is from softmax attention in the spectral norm, against landmarks and length.

Informer, the figure's fourth method, is not in this library.
"""

from __future__ import annotations

import functools
from itertools import product
from statistics import fmean
from typing import Any

import torch

from sparing import documents
from sparing.documents import Documents
from sparing.workbench.prepare import extended
from sparing_lab.figure import PAPER, Figure, line, log_ticks, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._layers import encoder_layers, loaded, untrained
from sparing_lab.studies._skyformer_spectral import SPECS, LayerInputs, layer_inputs, spectral_errors
from sparing_lab.studies.judges import Criterion, Judge, NotRun, above, ahead, each, falls
from sparing_lab.studies.rows import Cell, Row, Rows, curves, distinct, ends, grouped, mean, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot
from sparing_lab.tasks import wikitext

BUDGETS = (16, 32, 64, 128, 256)
WEIGHTS = ("initialised", "pretrained")
MODELS = {"small": "minilm", "paper": "bert-base-cased"}
LENGTHS = {"small": (512, 2048), "paper": (512, 1024, 2048, 4096)}
#: Read off the paper's figure, within 3 %: weights and length -> method -> values by the number of landmarks.
READ = {(weights, length): numbers("skyformer", "figure 1")[f"{weights} {length}"] for weights in WEIGHTS
        for length in (512, 4096)}  # fmt: skip
Panel = tuple[str, int]  #: a panel of the figure: weights and length


def _cells(settings: Settings) -> list[Cell]:
    seeds = settings.seeds or 3
    if settings.data is not None and settings.small and wikitext.path_in(settings.data) is None:
        settings.refuse_unused("wikitext2/valid.txt, plain text (may be .xz)")
    text = _documents(settings)
    model = settings.model or MODELS[settings.scale]
    given = {"model": model, "text": text.name, "fingerprint": text.fingerprint}
    cells: list[Cell] = []
    for weights in WEIGHTS:
        for length, seed in product(LENGTHS[settings.scale], range(seeds)):
            here = {**given, "weights": weights, "length": length, "seed": seed}
            cells.append({**here, "method": "values", "budget": 0})
            cells += [{**here, "method": name, "budget": d} for name in (*SPECS, "own") for d in BUDGETS]
    return cells


def _measure(settings: Settings, cell: Cell) -> Row:
    inputs = _inputs(settings, *(cell[name] for name in ("model", "weights", "length", "seed", "fingerprint")))
    return spectral_errors(cell["method"], cell["budget"], inputs, cell["seed"])


def _documents(settings: Settings) -> Documents:
    """Return WikiText-2, as in the paper, or at small scale without that file Python's help topics."""
    if settings.small and (settings.data is None or wikitext.path_in(settings.data) is None):
        return documents.default()
    return wikitext.read(settings.data, wanted_by="skyformer-spectral")


@functools.lru_cache(maxsize=1)
@torch.no_grad()
def _inputs(
    settings: Settings, model: str, weights: str, length: int, seed: int, fingerprint: str
) -> list[LayerInputs]:
    """Return the inputs of all layers (every second at small scale) for text number `seed`; fingerprint: the texts'."""
    subject = loaded(model) if weights == "pretrained" else untrained(loaded(model), seed=seed)
    if subject.positions is not None and length > subject.positions:
        subject = extended(subject, length)
    texts = _documents(settings).texts
    if seed >= len(texts):
        raise ValueError(f"seeds: each takes a text of its own, and there are {len(texts)}")
    ids = subject.encode(texts[seed : seed + 1], length)[0][0]
    if len(ids) < length:
        raise ValueError(f"seeds: each takes a text of {length} tokens, and there are only {seed}")
    every = encoder_layers(subject.model, ids[None])
    some = every[1::2] if settings.small else every
    return [layer_inputs(layer.query, layer.key, layer.projected) for layer in some]


def _curves(rows: Rows, field: str = "error") -> dict[Panel, dict[str, dict[int, float]]]:
    """Return panel -> method -> mean over seeds by the number of landmarks."""
    return {
        panel: curves(here, "budget", field, "method") for panel, here in grouped(rows, "weights", "length").items()
    }


def _ends(rows: Rows) -> dict[Panel, dict[str, dict[int, float]]]:
    """Return the figure's panels: both weights at the shortest and the longest length; the paper's three methods."""
    found, lengths = _curves(rows), ends(distinct(rows, "length"))
    return {(weights, length): {name: found[weights, length][name] for name in SPECS}
            for weights in WEIGHTS for length in lengths}  # fmt: skip


Ends = dict[Panel, dict[str, dict[int, float]]]


def _won(found: Ends, budget: int) -> list[Panel]:
    """Return the panels where Skyformer's error is the least."""
    return [panel for panel, curves in found.items() if ahead("Skyformer", at=budget).holds(curves)]


def _in_panels(words: str, many: int) -> Criterion:
    return Criterion(words, lambda found: len(_won(found, BUDGETS[-1])) == many)


def _lost(found: Ends) -> list[set[Panel]]:
    """Return the panels where Skyformer is not ahead, for each number of landmarks from 64."""
    return [set(found) - set(_won(found, budget)) for budget in BUDGETS if budget >= 64]


def _pretrained(rows: Rows) -> dict[int, dict[str, float]]:
    """Return the errors at 16 landmarks on pretrained weights, by length."""
    return {length: {name: errors[16] for name, errors in curves.items()}
            for (weights, length), curves in _ends(rows).items() if weights == "pretrained"}  # fmt: skip


_WORST = each("the largest error", lambda errors: errors["Skyformer"] == max(errors.values()))


def _gains(rows: Rows) -> dict[Panel, float]:
    """Return the share by which Nystromformer's error falls from 16 to 256 landmarks."""
    return {panel: 1 - curves["Nystromformer"][256] / curves["Nystromformer"][16]
            for panel, curves in _ends(rows).items()}  # fmt: skip


def _by_length(found: dict[Panel, float]) -> tuple[list[float], list[float]]:
    short, long = ends(length for _, length in found)
    return [found[weights, short] for weights in WEIGHTS], [found[weights, long] for weights in WEIGHTS]


def _halves(found: dict[Panel, float]) -> bool:
    return all(late < max(early, 0.0) / 2 for early, late in zip(*_by_length(found), strict=True))


def _fallen(found: dict[Panel, dict[int, float]]) -> str:
    factors = ", ".join(f"{errors[BUDGETS[0]] / errors[BUDGETS[-1]]:.1f} ({weights} {length})"
                        for (weights, length), errors in found.items())  # fmt: skip
    return f"by a factor of {factors}{'' if falls().holds(found) else '; not at every step'}"


def _growth(rows: Rows) -> dict[str, Any]:
    """Return error at the longest length / error at the shortest, for all weights, methods and landmarks."""
    found, (short, long) = _ends(rows), ends(distinct(rows, "length"))
    ratios = [
        found[weights, long][name][d] / found[weights, short][name][d]
        for weights in WEIGHTS for name in SPECS for d in BUDGETS
    ]  # fmt: skip
    return {"ratios": ratios, "lengths": (short, long)}


def _off(rows: Rows) -> list[float]:
    """Return the relative differences of errors from all values that were read off the paper's figure."""
    if any(row["model"] != MODELS["paper"] or "help topics" in row["text"] for row in rows):
        raise NotRun(f"needs {MODELS['paper']} and WikiText-2: --scale paper")
    found = _curves(rows)
    return [
        abs(found[panel][name][d] / value - 1)
        for panel, curves in READ.items() for name, read in curves.items() for d, value in read.items()
    ]  # fmt: skip


_NEAR = each("within 20 %", lambda off: off <= 0.2)


def _tables(rows: Rows) -> list[Table]:
    relative = _curves(rows, "relative")
    first, third = [], []
    for panel, here in grouped(rows, "weights", "length").items():
        where = f"{panel[0]} {panel[1]}"
        for name in SPECS:
            seen = [[row["error"] for row in pick(here, method=name, budget=d)] for d in BUDGETS]
            first.append([where, name, *(f"{fmean(x):.2g} ±{(max(x) - min(x)) / 2 / fmean(x):.0%}" for x in seen)])
            if read := READ.get(panel, {}).get(name):
                first.append(["", "  paper (BERT)", *(f"{read[d]:.2f}" if d in read else "" for d in BUDGETS)])
        facts = {name: mean(pick(here, method="values"), name) for name in
                 ("kernel", "spread", "keys", "error", "relative")}  # fmt: skip
        forms = ("{kernel:.1g}", "e^{spread:.1f}", "{keys:.0f}", "{error:.2f}", "{relative:.3f}")
        third.append([where, *(form.format_map(facts) for form in forms)])
    heads = {f"d = {d}": d for d in BUDGETS}
    second = [(panel, name) for panel in relative for name in (*SPECS, "own")]
    return [
        Table("Spectral norm of the error, mean and half the range over seeds",
              ["weights, tokens", "method", *heads], first),
        pivot("Divided by the spectral norm of the exact output; own kernel: of the dense form",
              ["weights, tokens", "method"], second, heads, lambda of, d: f"{relative[of[0]][of[1]][d]:.2g}",
              lambda of: [f"{of[0][0]} {of[0][1]}", "Skyformer, own kernel" if of[1] == "own" else of[1]]),
        Table("Queries and keys, medians; and the error of the mean of all values in place of attention",
              ["weights, tokens", "kernel of a pair", "key factors", "keys that count", "error", "relative"], third),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    found = _ends(rows)
    shortest = min(distinct(rows, "length"))
    for axes, (panel, ours) in zip(panels(figure, 2, 2, size=(4.2, 3.4)), found.items(), strict=True):
        theirs = (panel[0], 512 if panel[1] == shortest else 4096)
        here = pick(rows, weights=panel[0], length=panel[1])
        for number, name in enumerate(SPECS):
            look = style(number)
            line(axes, ours[name], name, number)
            seen = [[row["error"] for row in pick(here, method=name, budget=d)] for d in BUDGETS]
            axes.fill_between(BUDGETS, [min(x) for x in seen], [max(x) for x in seen], alpha=0.2, color=look["color"])
            line(axes, READ[theirs][name], **{**PAPER, "color": look["color"], "marker": look["marker"]},
                 markerfacecolor="none")  # fmt: skip
        plain = mean(pick(here, method="values"), "error")
        axes.axhline(plain, color="black", linestyle=":", label="mean of all values")
        axes.plot([], [], label="hollow: the paper's, read off", **{**PAPER, "marker": "o", "markerfacecolor": "none"})
        log_ticks(axes, BUDGETS)
        axes.set(xlabel="landmarks or features d", ylabel="spectral norm of the error", yscale="log",
                 title=f"{panel[0]}, {panel[1]} tokens (the paper's: BERT, {theirs[1]})")  # fmt: skip
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{rows[0]['model']} on {rows[0]['text']}; bands: all seeds")


STUDY = Study(
    name="skyformer-spectral", title="Spectral error of the attention output against landmarks and length",
    paper="skyformer", where="Figure 1", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds", "model"),
    claims=(
        Claim("best", "Figure 1", "at d = 256 Skyformer has the least error everywhere",
              "0.36, 1.2, 0.51, 1.27; the next 0.86, 4.1, 0.66, 2.3", judge=Judge(
                  _ends, _in_panels("less than Nystromformer and random features in all four panels", 4),
                  _in_panels("in three", 3), lambda found: f"in {len(_won(found, 256))} of 4 panels: " + (
                      ", ".join(f"{weights} {length}" for weights, length in _won(found, 256)) or "none"))),
        Claim("from-64", "Figure 1", "Skyformer is ahead from about d = 64", "all panels", judge=Judge(
            _ends, Criterion("ahead at 64, 128 and 256 in all four panels", lambda found: not any(_lost(found))),
            Criterion("at 128 and 256, or in all panels but one",
                      lambda found: not any(_lost(found)[1:]) or len(set().union(*_lost(found))) == 1),
            lambda found: "panels ahead: " + ", ".join(
                f"{len(_won(found, d))} of 4 at {d}" for d in BUDGETS if d >= 64))),
        Claim("worst-16", "Figure 1", "at d = 16 Skyformer is the worst on pretrained weights",
              "2.14 at 512 (the next 1.54), 3.78 at 4096 (the next 2.9)", judge=Judge(
                  _pretrained, _WORST, _WORST.once("at one"), lambda found: "; ".join(
                      f"{length}: " + ", ".join(f"{name} {value:.2f}" for name, value in errors.items())
                      for length, errors in found.items()), of="at both lengths")),
        Claim("falls", "Figure 1", "Skyformer's error falls steadily with d",
              "by a factor of 3.0 to 4.2 from 16 to 256", judge=Judge(
                  lambda rows: {panel: curves["Skyformer"] for panel, curves in _ends(rows).items()},
                  falls("d in every panel") & each("in all by 2.5 or more", lambda errors: (
                      errors[BUDGETS[-1]] <= errors[BUDGETS[0]] / 2.5)),
                  falls("d in every panel"), _fallen)),
        Claim("flat", "Figure 1", "at the longest length Nystromformer hardly gains from landmarks",
              "4096 tokens: 4.64 to 4.61, 2.5 to 2.45; 512 tokens: 1.34 to 0.93, 1.16 to 0.66", judge=Judge(
                  _gains, Criterion("less than 5 %", lambda found: max(_by_length(found)[1]) < 0.05),
                  Criterion("less than half of that at the shortest length", _halves),
                  lambda found: "falls by " + ", ".join(
                      f"{fall:.0%} ({weights} {length})" for (weights, length), fall in found.items()),
                  of="fall of its error from d = 16 to 256")),
        Claim("grows", "Figure 1", "errors grow with the length", "by a factor of 1.8 to 5.0 from 512 to 4096",
              judge=Judge(
                  _growth, above(1).of("ratios"), above(1).in_share(0.9, "in nine of ten cases").of("ratios"),
                  lambda found: "in {} of {} cases, from {} to {} tokens by a factor of {:.1f} to {:.1f}".format(
                      sum(x > 1 for x in found["ratios"]), len(found["ratios"]), *found["lengths"],
                      *ends(found["ratios"])), of="growth for every method, d and weights")),
        Claim("values", "Figure 1", "the errors themselves", "see the figure", judge=Judge(
            _off, _NEAR, _NEAR.in_share(0.5, "for half of them"), lambda found: (
                f"{sum(off <= 0.2 for off in found)} of {len(found)} within 20 %, the farthest {max(found):.0%} off"),
            of="every value that was read off")),
    ),
)  # fmt: skip
