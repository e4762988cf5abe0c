"""Pretraining with hash collisions in place of softmax, and how many hashes it takes, then and later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from sparing.documents import default, read
from sparing_lab.figure import Figure, legend_below, level, line, log_ticks, panels, style
from sparing_lab.studies._trained import running
from sparing_lab.studies._yoso_trained import EXPECTATION, METHODS, SAMPLED, YOSO, frequencies, start, started
from sparing_lab.studies.judges import Criterion, Judge, NotRun, at_most, falls, listed
from sparing_lab.studies.rows import Cell, Row, Rows, curve, distinct, mean, pick, the
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, pivot
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

SEEDS = {"small": 2, "paper": 1}
BITS = 9  #: bits of the paper's codes, log2(512)
SHARP = f"YOSO-E, {BITS} bits"
SUMS = "YOSO-E, sums"  #: rows divided by the sum of their weights, as softmax's are, and not by their length
MODELS = {
    **METHODS,
    SHARP: f"yoso(expectation=True, bits={BITS})",
    SUMS: "yoso(expectation=True, normalize=sum)",
}
TRIED = (8, 16, 32, 64, 128, 256)  #: numbers of hashes at validation
_SMALL: dict[str, Any] = {"max_length": 64, "hidden_size": 64, "num_heads": 2, "num_layers": 2,
                          "intermediate_size": 128, "batch_size": 16,
                          "max_steps": 700, "learning_rate": 3e-3, "warmup_ratio": 0.1, "eval_steps": 100}  # fmt: skip
# BERT-base, as the authors pretrained it; its tokens are bytes here.
_PAPER: dict[str, Any] = {"max_length": 512, "hidden_size": 768, "num_heads": 12, "num_layers": 12,
                          "intermediate_size": 3072, "norm": "post",
                          "dropout": 0.1, "batch_size": 256, "max_steps": 500_000, "learning_rate": 1e-4,
                          "warmup_ratio": 0.01,
                          "eval_steps": 2000}  # fmt: skip
#: The second phase: longer texts, as many tokens in a step. The paper does not say for how many steps.
_LONGER: dict[str, dict[str, Any]] = {
    "small": {"max_length": 128, "batch_size": 8, "max_steps": 80, "eval_steps": 20},
    "paper": {"max_length": 4096, "batch_size": 32, "max_steps": 100_000, "eval_steps": 2000},
}
# The start of small models with any method: with it, they learn to attend to neighbours in hundreds of steps, not
# thousands.
_START = {"tokens": 0.12, "positions": 0.15}
MATCH, NEAR = 0.02, 0.10  #: nats: 2 % and 10 % of a perplexity
ROOM = 0.01  #: nats of difference that count as noise
HALF = math.log(2)  #: the loss of guessing the order
LEARNED = 0.05  #: nats below HALF that count as learned


def _cells(settings: Settings) -> list[Cell]:
    data, text = _text(settings)
    asked = _SMALL if settings.small else _PAPER
    models = [name for name in MODELS if settings.small or name != SHARP]
    return [
        {
            "model": name, "seed": seed, "text": text, "longer": _LONGER[settings.scale], "hashes": list(TRIED),
            "start": _START if settings.small else None,
            "config": asdict(Config("order", MODELS[name], data=data, seed=seed, **asked)),
        }
        for seed in range(settings.seeds or SEEDS[settings.scale]) for name in models
    ]  # fmt: skip


def _text(settings: Settings) -> tuple[str | None, str]:
    """Return the folder of training texts, None for the default texts, and their fingerprint."""
    found = settings.files(
        "*.txt", "*.txt.xz", "*.txt.gz", wanted="*.txt (UTF-8 text, may be .xz or .gz)",
        paper="yoso-pretraining needs DATA/*.txt (UTF-8 text, may be .xz or .gz); --data names the folder. The paper's "
        "are BookCorpus and English Wikipedia (hub: bookcorpus, wikipedia)",
    )  # fmt: skip
    return (str(settings.data), read(found, whole=True).fingerprint) if found else (None, default().fingerprint)


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


def _tried(training: Training, hashes: Sequence[int], seed: int) -> list[Row]:
    """Evaluate the trained model with other numbers of hashes, and with their expectation."""
    specs = {**{str(many): f"yoso(hashes={many})" for many in hashes}, "E": EXPECTATION}
    found = []
    for at, spec in specs.items():
        with running(training.bare, spec, seed=seed):
            found.append({"what": "hashes", "at": at, "record": training.evaluate()})
    return found


def _longer(training: Training, longer: dict[str, Any]) -> tuple[dict[str, float], ...]:
    """Continue training with longer texts, with the position embeddings repeated, and return its evaluations."""
    model = training.bare
    model.masked.encoder.extend_positions(longer["max_length"])
    return started(replace(training.config, **longer), model.state_dict()).run().records


def last(rows: Rows, model: str, quantity: str, what: str = "curve") -> float:
    """Return the loss at the end of training, mean over seeds."""
    return mean(pick(rows, what=what, model=model), lambda row: row["curve"][-1][quantity])


def at(rows: Rows, model: str, quantity: str) -> dict[Any, float]:
    """Return the losses of a trained model by the hashes at validation, and with the expectation; means over seeds."""
    found = pick(rows, what="hashes", model=model)
    return {many: mean(pick(found, at=str(many)), lambda row: row["record"][quantity]) for many in (*TRIED, "E")}


def _guess(rows: Rows) -> float:
    """Return the perplexity of a model that knows only byte frequencies."""
    return mean(pick(rows, what="curve"), "frequencies")


def _learned(rows: Rows, quantity: str) -> Rows:
    """Return the rows; raise NotRun if softmax has not learned the objective."""
    found = last(rows, "softmax", quantity)
    if quantity == "order_loss" and found > HALF - LEARNED:
        raise NotRun(f"softmax has not learned the order in these steps: loss {found:.3f}, a guess has {HALF:.3f}")
    if quantity == "valid_loss" and math.exp(found) > 0.8 * _guess(rows):
        raise NotRun(
            f"softmax has learned little more than how often bytes occur: perplexity {math.exp(found):.1f}, these "
            f"{_guess(rows):.1f}"
        )
    return rows


def _value(quantity: str, loss: float) -> str:
    return f"{math.exp(loss):.2f}" if quantity == "valid_loss" else f"{loss:.3f}"


def _ends(quantity: str, *models: str) -> Callable[[Rows], dict[str, float]]:
    """Return a function for the losses of models at the end of training."""

    def figures(rows: Rows) -> dict[str, float]:
        if missing := set(models) - set(distinct(_learned(rows, quantity), "model")):
            raise NotRun(f"log2 of the length is {BITS} here" if SHARP in missing else f"needs {', '.join(missing)}")
        return {model: last(rows, model, quantity) for model in models}

    return figures


def _behind(model: str, other: str, most: float) -> Criterion:
    return Criterion(f"{model} at most {most:g} nats above {other}", lambda found: found[model] <= found[other] + most)


def _matches(quantity: str) -> Judge:
    return Judge(
        _ends(quantity, "YOSO-E", "softmax"), _behind("YOSO-E", "softmax", MATCH), _behind("YOSO-E", "softmax", NEAR),
        lambda found: listed({model: _value(quantity, loss) for model, loss in found.items()}, "{key} {value}"),
        of=_GUARD,
    )  # fmt: skip


def _normalised(quantity: str) -> Judge:
    return Judge(
        _ends(quantity, "YOSO-E", SUMS), _behind("YOSO-E", SUMS, MATCH), _behind("YOSO-E", SUMS, NEAR),
        lambda found: f"rows of length 1 {_value(quantity, found['YOSO-E'])}, weights that sum to 1 "
        f"{_value(quantity, found[SUMS])}", of=_GUARD,
    )  # fmt: skip


def _approaches(quantity: str) -> Judge:
    nearer = Criterion("64 is below 16", lambda found: found["YOSO-64"] < found["YOSO-16"])
    return Judge(
        _ends(quantity, *SAMPLED, "YOSO-E"), falls("16, 32, 64 hashes and E", ROOM) & nearer & _behind(
            "YOSO-64", "YOSO-E", NEAR), nearer,
        lambda found: listed({model: _value(quantity, loss) for model, loss in found.items()}, "{key} {value}"),
        of=_GUARD,
    )  # fmt: skip


def _converges(quantity: str) -> Judge:
    first, most = TRIED[0], TRIED[-1]

    def figures(rows: Rows) -> dict[str, Any]:
        found = {model: at(_learned(rows, quantity), model, quantity) for model in YOSO}
        gaps = {model: abs(losses[most] - losses["E"]) for model, losses in found.items()}
        return {"curves": {model: [losses[many] for many in TRIED] for model, losses in found.items()},
                "gaps": gaps, "worst": (worst := max(gaps, key=gaps.__getitem__)), "losses": found[worst]}  # fmt: skip

    def shows(found: dict[str, Any]) -> str:
        few, many, expected = (_value(quantity, found["losses"][hashes]) for hashes in (first, most, "E"))
        gap = found["gaps"][found["worst"]]
        return (
            f"{found['worst']}: {few} with {first}, {many} with {most}, {expected} with the expectation; largest gap "
            f"of all models {gap:.3f} nats"
        )

    better = Criterion(
        f"{most} hashes are below {first}", lambda found: all(each[-1] < each[0] for each in found["curves"].values())
    )
    whole = falls("the hashes at validation", ROOM).of("curves") & better
    return Judge(figures, whole & at_most(MATCH).of("gaps", "from the expectation"), better, shows,
                 of=f"every model, {_GUARD}")  # fmt: skip


def _wider(quantity: str) -> Judge:
    def figures(rows: Rows) -> dict[str, Any]:
        _learned(rows, quantity)
        short, long = (
            {model: last(rows, model, quantity, what) - last(rows, "softmax", quantity, what) for model in YOSO}
            for what in ("curve", "longer")
        )
        return {"short": short, "long": long, "grow": {model: long[model] - short[model] for model in YOSO}}

    def shows(found: dict[str, Any]) -> str:
        grow = found["grow"]
        worst = max(grow, key=grow.__getitem__)
        return (
            f"{worst} is {found['short'][worst]:+.3f} nats from softmax before, {found['long'][worst]:+.3f} after; the "
            f"distance grows by {grow[worst]:+.3f} at most, {fmean(grow.values()):+.3f} on average"
        )

    limit = at_most(MATCH, " nats")
    return Judge(figures, limit.of("grow"), limit.on_average().of("grow"), shows,
                 of=f"growth of the distance to softmax for every number of hashes, {_GUARD}")  # fmt: skip


_GUARD = "where softmax has learned it itself"


def _tables(rows: Rows) -> list[Table]:
    steps = [int(the(rows, what=what, model="softmax", seed=0)["curve"][-1]["step"]) for what in ("curve", "longer")]
    lengths = [rows[0]["config"]["max_length"], rows[0]["longer"]["max_length"]]
    ends = [["byte frequencies", f"{_guess(rows):.2f}", "", "", f"{HALF:.3f}", "", "", ""]]
    for model in distinct(rows, "model"):
        line = [model]
        for quantity in ("valid_loss", "order_loss"):
            found = [row["curve"][-1][quantity] for row in pick(rows, what="curve", model=model)]
            more = fmean(found) - last(rows, "softmax", quantity)
            line += [_value(quantity, fmean(found)), " ".join(_value(quantity, each) for each in found),
                     "" if model == "softmax" else f"{more:+.3f}"]  # fmt: skip
        ends.append([*line, _value("valid_loss", last(rows, model, "valid_loss", "longer"))])
    seeds = len(pick(rows, what="curve", model="softmax"))
    title = f"After {steps[0]} steps, {lengths[0]} tokens (last: {steps[1]} more with {lengths[1]}); {seeds} seeds"
    names = {"valid_loss": "perplexity", "order_loss": "order loss"}
    return [
        Table(title, ["model", "perplexity", "seeds", "nats", "order loss", "seeds", "nats", "longer"], ends),
        pivot("Hashes at validation", ["trained with", ""], [(each, model) for each in names for model in YOSO],
              (*TRIED, "E"), lambda of, many: _value(of[0], at(rows, of[1], of[0])[many]),
              lambda of: [of[1], names[of[0]]]),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    six = panels(figure, 2, 3, size=(4.4, 3.5))
    looks: dict[str, Any] = {model: style(number) for number, model in enumerate((*YOSO, SHARP, SUMS))}
    looks["softmax"] = {"color": "black", "marker": "*", "markersize": 6}
    lengths = [rows[0]["config"]["max_length"], rows[0]["longer"]["max_length"]]
    shown = {"perplexity": "perplexity of hidden bytes", "order_loss": "loss of sentence order, nats"}
    for row, (quantity, words) in enumerate(shown.items()):
        left, middle, right = six[3 * row : 3 * row + 3]
        for axes, what, title in (
            (left, "curve", f"{lengths[0]} tokens"),
            (right, "longer", f"then {lengths[1]} tokens"),
        ):
            for model in distinct(rows, "model"):
                points = [point for each in pick(rows, what=what, model=model) for point in each["curve"]]
                line(axes, curve(points, "step", quantity), model, **looks[model])
            axes.set(xlabel="steps", ylabel=words, title=title)
        for model in YOSO:
            found = at(rows, model, quantity)
            line(middle, {many: found[many] for many in TRIED}, **looks[model])
            level(middle, found["E"], color=looks[model]["color"], linestyle=":", linewidth=1)
        middle.set(xlabel="hashes at validation", ylabel=words, title="More hashes; dotted: the expectation")
        log_ticks(middle, TRIED)
    level(six[0], _guess(rows), linestyle="--", label="a guess")
    for axes in six[3:]:
        level(axes, HALF, linestyle="--")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, HALF - 2 * LEARNED), max(high, HALF + LEARNED))  # so that noise does not fill the axis
    legend_below(figure, six[:1], 8)


def _both(key: str, where: str, states: str, paper: str, judge: Callable[[str], Judge]) -> list[Claim]:
    """Return a claim about hidden bytes, and the same about the order of sentences."""
    first = Claim(f"masked{key}", where, f"{states}: perplexity of hidden bytes", paper, judge=judge("valid_loss"))
    return [first, Claim(f"order{key}", where, f"{states}: loss of sentence order", paper, judge=judge("order_loss"))]


STUDY = Study(
    name="yoso-pretraining", title="Masked text and sentence order, learned with hash collisions in place of softmax",
    paper="yoso", where="figure 3", cells=_cells, measure=_measure, tables=_tables, draw=_draw,
    options=("data", "seeds"),
    claims=(
        *_both("", "figure 3 a", "YOSO-E matches softmax", "matches and slightly exceeds", _matches),
        *_both("-normalised", "eq. 6, figure 3", "rows of length 1 in place of weights that sum to 1 cost nothing",
               "does not affect the performance", _normalised),
        *_both("-hashes", "figure 3 a", "trained with more hashes, models come nearer to YOSO-E",
               "approach the curve of the expectation", _approaches),
        *_both("-validation", "figure 3 b", "more hashes at validation, down to the expectation",
               "generally decreases for all models", _converges),
        *_both("-longer", "figure 3 c", "longer texts do not widen the distance to softmax",
               "does not increase from 512 to 4096", _wider),
        Claim("bits", "section 6", f"{BITS} bits, as the paper's codes have, bring YOSO-E nearer to softmax",
              f"log2(n), which is {BITS} at 512 tokens", judge=Judge(
                  _ends("valid_loss", "softmax", "YOSO-E", SHARP),
                  Criterion("its distance to softmax is at most half as large", lambda found: (
                      found[SHARP] - found["softmax"] <= (found["YOSO-E"] - found["softmax"]) / 2)),
                  Criterion(f"{MATCH:g} nats smaller", lambda found: found[SHARP] <= found["YOSO-E"] - MATCH),
                  lambda found: f"{math.exp(found['YOSO-E']):.2f} with log2(n), {math.exp(found[SHARP]):.2f} with "
                  f"{BITS}; softmax {math.exp(found['softmax']):.2f}", of=_GUARD), ours=True),
    ),
)  # fmt: skip
