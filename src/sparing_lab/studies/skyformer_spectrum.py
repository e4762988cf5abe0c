"""How fast the singular values of attention's output fall off, in pretrained models and in untrained ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing import documents
from sparing import models as subject
from sparing import sample_text as text
from sparing.documents import Documents
from sparing.functional import attention
from sparing.transformers.watch import Seen, rehearse
from sparing.workbench.swap import cut
from sparing_lab.report.figure import PAPER, legend_below, panels, style
from sparing_lab.studies.judges import Judgement
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Claim, Settings, Study, judged, not_run
from sparing_lab.studies.tables import Table
from sparing_lab.tasks import listops

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 64  #: columns of the paper's matrices; heads stand side by side until they have so many
LAYER = 2  #: the paper's
#: Read off the paper's figure by eye: the values of numbers 10 and 64. Number 1 is 150 to 280.
READ_OFF = {
    "Retrieval": (1.2, 3.5e-3), "Pathfinder": (0.85, 2.5e-3), "Text": (0.23, 5e-4), "ListOps": (0.07, 1e-4),
}  # fmt: skip
FIRST = 200.0  #: the paper's value number 1, about
WEIGHTS = ("pretrained", "random")
LISTS = 40  #: of ListOps


def _texts(settings: Settings) -> dict[str, Documents]:
    """By what they are."""
    found = {
        "help topics": documents.default(),
        "ListOps": Documents("ListOps", tuple(" ".join(words) for words in islice(listops.examples(0), LISTS))),
        "Python source": Documents("standard library", tuple(text.python_sources())),
    }
    if settings.data is not None:
        folder = settings.data / "imdb"
        files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")], key=lambda path: path.name[:4] != "test")
        if files:  # the test set, where there is one
            reviews = documents.read(files[:1])
            found["film reviews"] = Documents(reviews.name, reviews.texts[:200])
        else:
            settings.refuse_unused("imdb/*.jsonl, an object with 'text' on each line (may be .xz)")
    return found


def _cells(settings: Settings) -> list[Cell]:
    if not settings.small and settings.model is None:
        raise ValueError(
            "model: the paper's are vanilla transformers of 2 layers and width 64, trained on the Long Range Arena, "
            "and were not published; train one and name its folder (config.json, weights, tokenizer) with --model"
        )
    models = ("minilm", "smollm2") if settings.model is None else (settings.model,)
    texts = _texts(settings)
    count = 4 if settings.small else 32
    return [
        {"model": model, "weights": weights, "text": name, "of": each.fingerprint, "documents": count, "length": 512}
        for model in models
        for weights in WEIGHTS
        for name, each in texts.items()
    ]


@functools.lru_cache(maxsize=1)
def _loaded(model: str, weights: str) -> subject.Subject:
    found = _pretrained(model)
    return found if weights == "pretrained" else untrained(found)


_pretrained = functools.lru_cache(maxsize=1)(subject.load)


def untrained(found: subject.Subject, *, seed: int = 0) -> subject.Subject:
    """The same model, with the weights that training would start from, and no more layers than are looked at."""
    config = copy.deepcopy(found.model.config)
    config.num_hidden_layers = LAYER
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return subject.Subject(found.name, type(found.model)(config).eval(), found.tokenizer)


def _measure(settings: Settings, cell: Cell) -> Row:
    found = _loaded(cell["model"], cell["weights"])
    length = min(cell["length"], found.positions or cell["length"])
    texts = _texts(settings)[cell["text"]].texts
    ids = cut(texts, lambda each: found.encode([each], length)[0][0].tolist(), length, cell["documents"])
    return spectrum(outputs(found, ids))


class _EnoughError(Exception):
    """The layer was seen."""


@torch.no_grad()
def outputs(found: subject.Subject, ids: Tensor) -> list[Tensor]:
    """What the heads of the second layer say, side by side: [documents x blocks, n, 64] for each document [n]."""
    kept: list[Tensor] = []
    seen: list[str] = []

    def see(call: Seen) -> None:
        seen.append(call.layer)
        if len(seen) == LAYER:
            given = {name: value for name, value in call.call.items() if name != "method"}
            kept.append(attention(call.query, call.key, call.projected, **given, method="exact")[0])
            raise _EnoughError

    for each in ids:
        seen.clear()
        try:
            with rehearse(found.model, "top_keys", see):
                found.run(each)
        except _EnoughError:
            pass
        else:
            raise ValueError(f"model: {found.name} has {len(seen)} attention layers, and the {LAYER}nd is wanted")
    return [blocks(each) for each in kept]


def blocks(heads: Tensor) -> Tensor:
    """[H, n, d] as matrices with 64 columns, of one head or more; with all heads' where these are fewer."""
    count, n, d = heads.shape
    each = max(1, min(count, WIDTH // d))
    whole = heads[: count // each * each]  # heads that are left over are left out
    return whole.unflatten(0, (-1, each)).transpose(1, 2).reshape(-1, n, each * d)


def spectrum(found: Sequence[Tensor]) -> Row:
    """Means over all matrices [..., n, e]: singular values, stable rank, how many are above a thousandth."""
    values = torch.cat([torch.linalg.svdvals(each.double()) for each in found])  # (matrices, e)
    first = values[:, :1]
    return {
        "values": values.mean(0).tolist(),
        "stable_rank": float((values / first).square().sum(-1).mean()),
        "mean_row": float(torch.cat([mean_row(each) for each in found]).mean()),
        "above": float((values > 1e-3 * first).double().sum(-1).mean()),
        "matrices": len(values),
    }


def mean_row(found: Tensor) -> Tensor:
    """The share of the squared size of [..., n, e] that is left if every row is the mean of all rows."""
    found = found.double()
    return found.shape[-2] * found.mean(-2).square().sum(-1) / found.square().sum((-2, -1))


def ratio(row: Row, number: int) -> float:
    """Singular value of that number against the first."""
    return float(row["values"][min(number, len(row["values"])) - 1] / row["values"][0])


def _range(rows: Rows, number: int) -> str:
    return f"{min(ratio(row, number) for row in rows):.1e} to {max(ratio(row, number) for row in rows):.1e}"


def _by_model(rows: Rows) -> dict[str, list[Row]]:
    found = pick(rows, weights="pretrained")
    return {model: pick(found, model=model) for model in dict.fromkeys(row["model"] for row in found)}


def _judge(number: int, limit: float, rows: Rows) -> Judgement:
    models = _by_model(rows)
    fast = {model: all(ratio(row, number) < limit for row in found) for model, found in models.items()}
    shown = "; ".join(f"{model} {_range(found, number)}" for model, found in models.items())
    control = pick(rows, weights="random")
    shown += f"; random weights {_range(control, number)}" if control else ""
    return judged(all(fast.values()), any(fast.values()), ours=shown)


def _fast(rows: Rows) -> Judgement:
    return _judge(10, 1e-2, rows)


def _tail(rows: Rows) -> Judgement:
    return _judge(64, 1e-4, rows)


def _order(rows: Rows) -> Judgement:
    tasks = {row["trained_on"]: ratio(row, 10) for row in rows if row.get("trained_on")}
    if not set(READ_OFF) <= set(tasks):
        return not_run("needs models that were trained on these tasks")
    hard, easy = (min(tasks["Retrieval"], tasks["Pathfinder"]), max(tasks["Text"], tasks["ListOps"]))
    return judged(hard > easy, ours=", ".join(f"{task} {found:.1e}" for task, found in tasks.items()))


def _tables(rows: Rows) -> list[Table]:
    columns = ["model", "weights", "text", "no. 10 / 1", "no. 64 / 1", "stable rank", "> 1e-3", "mean row"]
    lines = [
        [row["model"], row["weights"], row["text"], f"{ratio(row, 10):.1e}", f"{ratio(row, 64):.1e}",
         f"{row['stable_rank']:.2f}", f"{row['above']:.0f} of {len(row['values'])}", f"{row['mean_row']:.1%}"]
        for row in rows
    ]  # fmt: skip
    paper = [
        [task, f"{tenth / FIRST:.1e}", f"{last / FIRST:.1e}"] for task, (tenth, last) in READ_OFF.items()
    ]  # fmt: skip
    return [
        Table("Singular values of the second layer's output", columns, lines),
        Table("The paper's, read off its figure (number 1 taken as 200)", ["task", "no. 10 / 1", "no. 64 / 1"], paper),
    ]


def _draw(rows: Rows, figure: Figure) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    texts = list(dict.fromkeys(row["text"] for row in rows))
    axes = panels(figure, 1, len(models), size=(5.2, 4.2))
    for model, each in zip(models, axes, strict=True):
        for row in pick(rows, model=model):
            look = {**style(texts.index(row["text"])), "markevery": (0, 9)}
            random = row["weights"] == "random"
            words = row["text"] + (", random weights" if random else "")
            values = [value / row["values"][0] for value in row["values"]]
            each.plot(
                range(1, len(values) + 1), values, label=words, linestyle=":" if random else "-",
                markerfacecolor="white" if random else None, **look,
            )  # fmt: skip
        for number, (task, points) in enumerate(READ_OFF.items()):
            ratios = [point / FIRST for point in points]
            each.plot((10, 64), ratios, **{**PAPER, "marker": "x+12"[number]}, label=f"paper, read off: {task}")
        each.set(
            yscale="log", xlabel="number of the singular value", ylabel="singular value / the largest",
            title=f"{model}: second layer, n x {len(pick(rows, model=model)[0]['values'])}",
        )  # fmt: skip
    legend_below(figure, axes[:1], 3)


STUDY = Study(
    name="skyformer-spectrum",
    title="How fast the singular values of attention's output fall off",
    paper="skyformer",
    where="appendix B, Figure 2",
    cells=_cells,
    measure=_measure,
    tables=_tables,
    draw=_draw,
    options=("data", "model"),
    claims=(
        Claim(
            "fast", "appendix B, Figure 2", "the singular values of attention's output decay fast",
            "number 10 is 4e-4 (ListOps) to 6e-3 (Retrieval) of number 1",
            "below 1e-2 in every pretrained model on every text; same shape: in one model", _fast,
        ),
        Claim(
            "tail", "appendix B, Figure 2", "the last of 64 is about 1e-5 of the first", "5e-7 (ListOps) to 2e-5 "
            "(Retrieval)", "below 1e-4 in every pretrained model on every text; same shape: in one model", _tail,
        ),
        Claim(
            "order", "appendix B, Figure 2", "harder tasks decay slower: Retrieval and Pathfinder behind Text and "
            "ListOps", "number 10 of Retrieval 1.2, Pathfinder 0.85, Text 0.23, ListOps 0.07",
            "number 10 against number 1 is larger in both of the first than in both of the others", _order,
        ),
    ),
)  # fmt: skip
