"""Pretraining with hash collisions in place of softmax, and how many hashes it takes, then and later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from sparing.documents import default, read
from sparing.nn import Encoder
from sparing_lab.report.figure import legend_below, panels, style
from sparing_lab.studies._trained import running
from sparing_lab.studies._yoso_trained import EXPECTATION, METHODS, SAMPLED, YOSO, falling, started
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick, the
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = {"small": 2, "paper": 1}
BITS = 9  #: of the paper's codes, which are log2(512)
SHARP = f"YOSO-E, {BITS} bits"
MODELS = {**METHODS, SHARP: f"yoso(expectation=True, bits={BITS})"}
TRIED = (8, 16, 32, 64, 128, 256)  #: hashes at validation
_SMALL: dict[str, Any] = {"length": 64, "width": 64, "heads": 2, "layers": 2, "hidden": 128, "batch": 16,
                          "steps": 700, "rate": 3e-3, "warmup": 0.1, "evaluate": 100}  # fmt: skip
# BERT-base, as the authors pretrained it; its tokens are bytes here.
_PAPER: dict[str, Any] = {"length": 512, "width": 768, "heads": 12, "layers": 12, "hidden": 3072, "norm": "post",
                          "dropout": 0.1, "batch": 256, "steps": 500_000, "rate": 1e-4, "warmup": 0.01,
                          "evaluate": 2000}  # fmt: skip
#: What comes behind: longer texts, as many tokens a step. The paper does not say for how many steps.
_LONGER: dict[str, dict[str, Any]] = {
    "small": {"length": 128, "batch": 8, "steps": 80, "evaluate": 20},
    "paper": {"length": 4096, "batch": 32, "steps": 100_000, "evaluate": 2000},
}
# Of small models, whatever their method: they then learn in hundreds of steps to look at neighbours, not in thousands.
_START = {"tokens": 0.12, "positions": 0.15}
MATCH, NEAR = 0.02, 0.10  #: nats: 2 % and 10 % of a perplexity
ROOM = 0.01  #: nats that one may be above another by noise
HALF = math.log(2)  #: the loss of a guess at the order
LEARNED = 0.05  #: nats below it
_COUNTED = 2000  # examples whose bytes are counted


def _cells(settings: Settings) -> list[Cell]:
    data, text = _text(settings)
    asked = _SMALL if settings.small else _PAPER
    return [
        {
            "model": name, "seed": seed, "text": text, "longer": _LONGER[settings.scale], "hashes": list(TRIED),
            "start": _START if settings.small else None,
            "config": asdict(Config("order", MODELS[name], data=data, seed=seed, **asked)),
        }
        for seed in range(settings.seeds or SEEDS[settings.scale]) for name in (MODELS if settings.small else METHODS)
    ]  # fmt: skip


def _text(settings: Settings) -> tuple[str | None, str]:
    """The folder that is read, and the fingerprint of its texts."""
    found: list[Path] = []
    if settings.data is not None:
        found = sorted(path for end in ("txt", "txt.xz", "txt.gz") for path in settings.data.glob(f"*.{end}"))
    if found:
        return str(settings.data), read(found, whole=True).fingerprint
    settings.refuse_unused("*.txt (UTF-8 text, may be .xz or .gz)")
    if not settings.small:
        raise ValueError(
            "data: yoso-pretraining needs DATA/*.txt (UTF-8 text, may be .xz or .gz); --data names the folder. The "
            "paper's are BookCorpus and English Wikipedia (hub: bookcorpus, wikipedia)"
        )
    return None, default().fingerprint


def _measure(settings: Settings, cell: Cell) -> list[Row]:
    config = Config(**cell["config"])
    training = Training(config)
    if cell["start"] is not None:
        start(training.bare.masked.encoder, **cell["start"])
    curve = training.run().records
    rows: list[Row] = [{"what": "curve", "curve": list(curve), "frequencies": frequencies(training.task)}]
    if cell["model"] in YOSO:
        rows += _tried(training, cell["hashes"], cell["seed"])
    rows.append({"what": "longer", "curve": list(_longer(training, cell["longer"]))})
    return rows


@torch.no_grad()
def start(encoder: Encoder, *, tokens: float, positions: float) -> None:
    """Embeddings to start from: of tokens, of that size; of positions, waves of that height."""
    encoder.tokens.weight.mul_(tokens / encoder.tokens.weight.std())
    lengths = encoder.length ** torch.linspace(0, 1, encoder.width // 2)  # of waves, in radians
    angles = torch.arange(encoder.length)[:, None] / lengths
    encoder.positions.weight.copy_(positions * torch.cat([angles.sin(), angles.cos()], dim=-1))


def _tried(training: Training, hashes: Sequence[int], seed: int) -> list[Row]:
    """The trained model with other numbers of hashes, and with their expectation."""
    specs = {**{str(many): f"yoso(hashes={many})" for many in hashes}, "E": EXPECTATION}
    found = []
    for at, spec in specs.items():
        with running(training.bare, spec, seed=seed):
            found.append({"what": "hashes", "at": at, "record": training.evaluate()})
    return found


def _longer(training: Training, longer: dict[str, Any]) -> tuple[dict[str, float], ...]:
    """Training goes on with longer texts; what it knew about positions is repeated."""
    model = training.bare
    model.masked.encoder.extend_positions(longer["length"])
    return started(replace(training.config, **longer), model.state_dict()).run().records


def frequencies(task: Task) -> float:
    """The perplexity of a model that knows how often each byte occurs, and nothing else."""
    counts = [torch.zeros(task.vocabulary, dtype=torch.float64) for _ in range(2)]
    for number, split in enumerate((task.train, task.valid)):
        for index in range(min(len(split), _COUNTED)):
            counts[number] += torch.bincount(split[index].tokens, minlength=task.vocabulary)
    for each in counts:
        each[list(task.special)] = 0
    seen, held = counts
    free = task.vocabulary - len(task.special) - 1  # the mask is no byte
    nats = -((seen + 1) / (seen.sum() + free)).log()
    return float((held * nats).sum().div(held.sum()).exp())


def _curves(rows: Rows, model: str, what: str = "curve") -> list[list[dict[str, float]]]:
    """One for each seed."""
    return [row["curve"] for row in pick(rows, what=what, model=model)]


def last(rows: Rows, model: str, quantity: str, what: str = "curve") -> float:
    """At the end of training, mean over seeds."""
    return fmean(curve[-1][quantity] for curve in _curves(rows, model, what))


def at(rows: Rows, model: str, hashes: int | str, quantity: str) -> float:
    """Of a trained model with so many hashes, mean over seeds."""
    return fmean(row["record"][quantity] for row in pick(rows, what="hashes", model=model, at=str(hashes)))


def _models(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _learned(rows: Rows, quantity: str) -> Judgement | None:
    """Why nothing can be said: softmax has not learned it, either."""
    if quantity == "order_loss":
        found = last(rows, "softmax", quantity)
        why = f"softmax has not learned the order in these steps: loss {found:.3f}, a guess has {HALF:.3f}"
        return None if found <= HALF - LEARNED else not_run(why)
    found, guess = (
        math.exp(last(rows, "softmax", quantity)),
        fmean(row["frequencies"] for row in pick(rows, what="curve")),
    )
    why = f"softmax has learned little more than how often bytes occur: perplexity {found:.1f}, these {guess:.1f}"
    return None if found <= 0.8 * guess else not_run(why)


def _of(quantity: str) -> Callable[[Callable[[Rows, str], Judgement]], Callable[[Rows], Judgement]]:
    """A question about one of the two losses, put where softmax has learned it."""

    def wrap(judge: Callable[[Rows, str], Judgement]) -> Callable[[Rows], Judgement]:
        return lambda rows: _learned(rows, quantity) or judge(rows, quantity)

    return wrap


def _value(quantity: str, loss: float) -> str:
    return f"{math.exp(loss):.2f}" if quantity == "valid_loss" else f"{loss:.3f}"


def _matches(rows: Rows, quantity: str) -> Judgement:
    soft, expected = (last(rows, model, quantity) for model in ("softmax", "YOSO-E"))
    ours = f"YOSO-E {_value(quantity, expected)}, softmax {_value(quantity, soft)}"
    return judged(expected <= soft + MATCH, expected <= soft + NEAR, ours=ours)


def _approach(rows: Rows, quantity: str) -> Judgement:
    found = [last(rows, model, quantity) for model in SAMPLED]
    expected = last(rows, "YOSO-E", quantity)
    shown = ", ".join(f"{model} {_value(quantity, value)}" for model, value in zip(SAMPLED, found, strict=True))
    nearer = found[-1] < found[0]
    ours = f"{shown}, YOSO-E {_value(quantity, expected)}"
    return judged(nearer and falling([*found, expected], ROOM) and found[-1] <= expected + NEAR, nearer, ours=ours)


def _converges(rows: Rows, quantity: str) -> Judgement:
    gaps, falls, better = {}, True, True
    for model in YOSO:
        curve = [at(rows, model, many, quantity) for many in TRIED]
        gaps[model] = curve[-1] - at(rows, model, "E", quantity)
        falls, better = falls and falling(curve, ROOM), better and curve[-1] < curve[0]
    worst = max(gaps, key=lambda model: abs(gaps[model]))
    few, many, expected = (at(rows, worst, hashes, quantity) for hashes in (TRIED[0], TRIED[-1], "E"))
    ours = f"{worst}: {_value(quantity, few)} with {TRIED[0]}, {_value(quantity, many)} with {TRIED[-1]}, "
    ours += f"{_value(quantity, expected)} with the expectation; largest gap of all models {abs(gaps[worst]):.3f} nats"
    return judged(falls and better and abs(gaps[worst]) <= MATCH, better, ours=ours)


def _wider(rows: Rows, quantity: str) -> Judgement:
    short, long = (
        {model: last(rows, model, quantity, what) - last(rows, "softmax", quantity, what) for model in YOSO}
        for what in ("curve", "longer")
    )
    grow = {model: long[model] - short[model] for model in YOSO}
    worst = max(grow, key=lambda model: grow[model])
    ours = f"{worst} is {short[worst]:+.3f} nats from softmax before, {long[worst]:+.3f} after; the distance grows by "
    ours += f"{grow[worst]:+.3f} at most, {fmean(grow.values()):+.3f} on average"
    return judged(grow[worst] <= MATCH, fmean(grow.values()) <= MATCH, ours=ours)


def _bits(rows: Rows, quantity: str) -> Judgement:
    if SHARP not in _models(rows):
        return not_run(f"log2 of the length is {BITS} here")
    soft, rule, sharp = (last(rows, model, quantity) for model in ("softmax", "YOSO-E", SHARP))
    rule_, sharp_, soft_ = (_value(quantity, loss) for loss in (rule, sharp, soft))
    ours = f"{rule_} with log2(n), {sharp_} with {BITS}; softmax {soft_}"
    return judged(sharp - soft <= (rule - soft) / 2, sharp <= rule - MATCH, ours=ours)


def _tables(rows: Rows) -> list[Table]:
    steps = [int(the(rows, what=what, model="softmax", seed=0)["curve"][-1]["step"]) for what in ("curve", "longer")]
    lengths = [rows[0]["config"]["length"], rows[0]["longer"]["length"]]
    seeds = len(pick(rows, what="curve", model="softmax"))
    guess = fmean(row["frequencies"] for row in pick(rows, what="curve"))
    ends = [["byte frequencies", f"{guess:.2f}", "", "", f"{HALF:.3f}", "", "", ""]]
    for model in _models(rows):
        line = [model]
        for quantity in ("valid_loss", "order_loss"):
            found = [curve[-1][quantity] for curve in _curves(rows, model)]
            line += [_value(quantity, fmean(found)), " ".join(_value(quantity, each) for each in found)]
            more = fmean(found) - last(rows, "softmax", quantity)
            line.append("" if model == "softmax" else f"{more:+.3f}")
        ends.append([*line, _value("valid_loss", last(rows, model, "valid_loss", "longer"))])
    tried = [
        [model, words, *(_value(quantity, at(rows, model, many, quantity)) for many in (*TRIED, "E"))]
        for quantity, words in (("valid_loss", "perplexity"), ("order_loss", "order loss")) for model in YOSO
    ]  # fmt: skip
    return [
        Table(
            f"After {steps[0]} steps, {lengths[0]} tokens (last: {steps[1]} more with {lengths[1]}); {seeds} seeds",
            ["model", "perplexity", "seeds", "nats", "order loss", "seeds", "nats", "longer"], ends,
        ),
        Table("Hashes at validation", ["trained with", "", *map(str, TRIED), "E"], tried),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    six = panels(figure, 2, 3, size=(4.4, 3.5))
    looks = {model: style(number) for number, model in enumerate((*YOSO, SHARP))}
    looks["softmax"] = {"color": "black", "marker": "*", "markersize": 6}
    lengths = [rows[0]["config"]["length"], rows[0]["longer"]["length"]]
    shown = {"perplexity": "perplexity of hidden bytes", "order_loss": "loss of sentence order, nats"}
    for row, (quantity, words) in enumerate(shown.items()):
        left, middle, right = six[3 * row : 3 * row + 3]
        for axes, what, length in ((left, "curve", lengths[0]), (right, "longer", lengths[1])):
            for model in _models(rows):
                curves = _curves(rows, model, what)
                steps = [point["step"] for point in curves[0]]
                means = [fmean(curve[number][quantity] for curve in curves) for number in range(len(steps))]
                axes.plot(steps, means, label=model, **looks[model])
            title = f"{length} tokens" if what == "curve" else f"then {length} tokens"
            axes.set(xlabel="steps", ylabel=words, title=title)
        for model in YOSO:
            found = [at(rows, model, many, quantity) for many in TRIED]
            middle.plot(TRIED, found, **looks[model])
            middle.axhline(at(rows, model, "E", quantity), color=looks[model]["color"], linestyle=":", linewidth=1)
        middle.set(
            xscale="log", xlabel="hashes at validation", ylabel=words, title="More hashes; dotted: the expectation"
        )
        middle.set_xticks(TRIED, [str(many) for many in TRIED])
        middle.minorticks_off()
    guess = fmean(row["frequencies"] for row in pick(rows, what="curve"))
    six[0].axhline(guess, color="black", linestyle="--", linewidth=0.8, label="a guess")
    for axes in six[3:]:
        axes.axhline(HALF, color="black", linestyle="--", linewidth=0.8)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, HALF - 2 * LEARNED), max(high, HALF + LEARNED))  # so that noise looks small
    legend_below(figure, six[:1], 7)


_TOKENS = "perplexity of hidden bytes"
_ORDER = "loss of sentence order"
_GUARD = "; not run where softmax has not learned it itself"
_MATCHES = f"YOSO-E at most {MATCH:g} nats above softmax at the end; same shape: {NEAR:g}" + _GUARD
_APPROACHES = (
    f"16, 32, 64 hashes and E fall in this order with {ROOM:g} nats of room, 64 is below 16 and at most {NEAR:g} "
    "above E; same shape: 64 is below 16" + _GUARD
)
_CONVERGES = (
    f"every model, {TRIED[0]} to {TRIED[-1]} hashes at validation: falls with {ROOM:g} nats of room and ends at most "
    f"{MATCH:g} from the expectation; same shape: {TRIED[-1]} hashes are below {TRIED[0]}" + _GUARD
)
_WIDER = (
    f"the distance to softmax grows by at most {MATCH:g} nats for every number of hashes; same shape: on average"
    + _GUARD
)
STUDY = Study(
    name="yoso-pretraining",
    title="Masked text and sentence order, learned with hash collisions in place of softmax",
    paper="yoso",
    where="figure 3",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "seeds"),
    claims=(
        Claim("masked", "figure 3 a", f"YOSO-E matches softmax: {_TOKENS}", "matches and slightly exceeds", _MATCHES,
              _of("valid_loss")(_matches),),
        Claim("order", "figure 3 a", f"YOSO-E matches softmax: {_ORDER}", "matches and slightly exceeds", _MATCHES,
              _of("order_loss")(_matches)),
        Claim("masked-hashes", "figure 3 a", f"trained with more hashes, models come nearer to YOSO-E: {_TOKENS}",
              "approach the curve of the expectation", _APPROACHES, _of("valid_loss")(_approach)),
        Claim("order-hashes", "figure 3 a", f"trained with more hashes, models come nearer to YOSO-E: {_ORDER}",
              "approach the curve of the expectation", _APPROACHES, _of("order_loss")(_approach)),
        Claim("masked-validation", "figure 3 b", f"more hashes at validation, down to the expectation: {_TOKENS}",
              "generally decreases for all models", _CONVERGES, _of("valid_loss")(_converges)),
        Claim("order-validation", "figure 3 b", f"more hashes at validation, down to the expectation: {_ORDER}",
              "generally decreases for all models", _CONVERGES, _of("order_loss")(_converges)),
        Claim("masked-longer", "figure 3 c", f"longer texts do not widen the distance to softmax: {_TOKENS}",
              "does not increase from 512 to 4096", _WIDER, _of("valid_loss")(_wider)),
        Claim("order-longer", "figure 3 c", f"longer texts do not widen the distance to softmax: {_ORDER}",
              "does not increase from 512 to 4096", _WIDER, _of("order_loss")(_wider)),
        Claim("bits", "section 6", f"{BITS} bits, as the paper's codes have, bring YOSO-E nearer to softmax",
              f"log2(n), which is {BITS} at 512 tokens",
              f"its distance to softmax is at most half as large; same shape: {MATCH:g} nats smaller" + _GUARD,
              _of("valid_loss")(_bits), ours=True),
    ),
)  # fmt: skip
