"""How fast the singular values of attention's output fall off, in pretrained models and in untrained ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from sparing import documents
from sparing import models as subject
from sparing import sample_text as text
from sparing.documents import Documents
from sparing.functional import attention
from sparing.transformers.watch import ObservedCall, observe_calls
from sparing_lab.figure import PAPER, Figure, legend_below, panels, style
from sparing_lab.papers import numbers
from sparing_lab.studies._layers import loaded, untrained
from sparing_lab.studies._pretrained import cut
from sparing_lab.studies.judges import Criterion, Judge, ahead
from sparing_lab.studies.rows import Cell, Row, Rows, distinct, grouped, pick
from sparing_lab.studies.study import Claim, Settings, Study
from sparing_lab.studies.tables import Table, listing
from sparing_lab.tasks import listops

WIDTH = 64  #: columns of the paper's matrices; heads are joined until they have that many
LAYER = 2  #: the paper's layer, counted from 1
READ_OFF = numbers("skyformer", "singular values")  #: singular values number 10 and 64, by task
FIRST = 200.0  #: the paper's first singular value, about
WEIGHTS = ("pretrained", "random")
LISTS = 40  #: number of examples of ListOps


def _texts(settings: Settings) -> dict[str, Documents]:
    """Return the texts by their kind."""
    found = {
        "help topics": documents.default(),
        "ListOps": Documents("ListOps", tuple(" ".join(words) for words in islice(listops.examples(0), LISTS))),
        "Python source": Documents("standard library", tuple(text.python_sources())),
    }
    if settings.data is not None:
        folder = settings.data / "imdb"
        files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")], key=lambda path: path.name[:4] != "test")
        if files:  # the test set, if there is one
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


def _measure(settings: Settings, cell: Cell) -> Row:
    found = loaded(cell["model"])
    if cell["weights"] == "random":
        found = untrained(found, layers=LAYER)
    length = min(cell["length"], found.positions or cell["length"])
    texts = _texts(settings)[cell["text"]].texts
    ids = cut(texts, lambda each: found.encode([each], length)[0][0].tolist(), length, cell["documents"])
    return spectrum(outputs(found, ids))


class _EnoughError(Exception):
    """Raised to stop the model after the layer that is measured."""


@torch.no_grad()
def outputs(found: subject.Subject, ids: Tensor) -> list[Tensor]:
    """Return the outputs of the second layer's heads, side by side: [documents x blocks, n, 64] for each document."""
    kept: list[Tensor] = []
    seen: list[str] = []

    def see(call: ObservedCall) -> None:
        seen.append(call.layer)
        if len(seen) == LAYER:
            given = {name: value for name, value in call.call.items() if name != "method"}
            kept.append(attention(call.query, call.key, call.projected, **given, method="exact")[0])
            raise _EnoughError

    for each in ids:
        seen.clear()
        try:
            with observe_calls(found.model, "top_keys", see):
                found.run(each)
        except _EnoughError:
            pass
        else:
            raise ValueError(f"model: {found.name} has {len(seen)} attention layers, and the {LAYER}nd is wanted")
    return [blocks(each) for each in kept]


def blocks(heads: Tensor) -> Tensor:
    """Return [H, n, d] as matrices with 64 columns, of one head or more; with all heads' where these are fewer."""
    count, n, d = heads.shape
    each = max(1, min(count, WIDTH // d))
    whole = heads[: count // each * each]  # heads that do not fill a block are left out
    return whole.unflatten(0, (-1, each)).transpose(1, 2).reshape(-1, n, each * d)


def spectrum(found: Sequence[Tensor]) -> Row:
    """Return means over all matrices [..., n, e]: singular values, stable rank, how many are above a thousandth."""
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
    """Return the share of the squared size of [..., n, e] that is left if every row is the mean of all rows."""
    found = found.double()
    return found.shape[-2] * found.mean(-2).square().sum(-1) / found.square().sum((-2, -1))


def ratio(row: Row, number: int) -> float:
    """Return the singular value of that number / the first."""
    return float(row["values"][min(number, len(row["values"])) - 1] / row["values"][0])


def _decays(number: int, limit: float) -> Judge:
    """Judge whether the singular value of that number is below a share of the first."""

    def figures(rows: Rows) -> dict[str, list[float]]:
        found = {model: [ratio(row, number) for row in some]
                 for model, some in grouped(pick(rows, weights="pretrained"), "model").items()}  # fmt: skip
        control = [ratio(row, number) for row in pick(rows, weights="random")]
        return {**found, **({_CONTROL: control} if control else {})}

    def fast(found: dict[str, list[float]]) -> list[bool]:
        return [max(ratios) < limit for model, ratios in found.items() if model != _CONTROL]

    return Judge(
        figures, Criterion(f"below {limit:g} in every pretrained model on every text", lambda found: all(fast(found))),
        Criterion("in one model", lambda found: any(fast(found))), lambda found: "; ".join(
            f"{name} {min(ratios):.1e} to {max(ratios):.1e}" for name, ratios in found.items()),
        of=f"singular value number {number} / number 1",
    )  # fmt: skip


_CONTROL = "random weights"


def _tasks(rows: Rows) -> dict[str, float]:
    """Return singular value number 10 / number 1, by the task that a model was trained on."""
    found = {row["trained_on"]: ratio(row, 10) for row in rows if row.get("trained_on")}
    return found if set(READ_OFF) <= set(found) else {}


def _tables(rows: Rows) -> list[Table]:
    rows = [{**row, "tenth": ratio(row, 10), "final": ratio(row, 64), "count": len(row["values"])} for row in rows]
    paper = [{"task": task, "tenth": tenth / FIRST, "final": last / FIRST} for task, (tenth, last) in READ_OFF.items()]
    ratios = {"no. 10 / 1": "{tenth:.1e}", "no. 64 / 1": "{final:.1e}"}
    return [
        listing("Singular values of the second layer's output", rows,
                {"model": "{model}", "weights": "{weights}", "text": "{text}", **ratios,
                 "stable rank": "{stable_rank:.2f}", "> 1e-3": "{above:.0f} of {count}", "mean row": "{mean_row:.1%}"}),
        listing("The paper's, read off its figure (number 1 taken as 200)", paper, {"task": "{task}", **ratios}),
    ]  # fmt: skip


def _draw(rows: Rows, figure: Figure) -> None:
    texts, models = distinct(rows, "text"), grouped(rows, "model")
    axes = panels(figure, 1, len(models), size=(5.2, 4.2))
    for (model, some), panel in zip(models.items(), axes, strict=True):
        for row in some:
            random = row["weights"] == "random"
            values = [value / row["values"][0] for value in row["values"]]
            panel.plot(
                range(1, len(values) + 1), values, label=row["text"] + (", random weights" if random else ""),
                linestyle=":" if random else "-", markerfacecolor="white" if random else None, markevery=(0, 9),
                **style(texts.index(row["text"])),
            )  # fmt: skip
        for marker, (task, points) in zip("x+12", READ_OFF.items(), strict=True):
            ratios = [point / FIRST for point in points]
            panel.plot((10, 64), ratios, **{**PAPER, "marker": marker}, label=f"paper, read off: {task}")
        panel.set(
            yscale="log", xlabel="number of the singular value", ylabel="singular value / the largest",
            title=f"{model}: second layer, n x {len(some[0]['values'])}",
        )  # fmt: skip
    legend_below(figure, axes[:1], 3)


STUDY = Study(
    name="skyformer-spectrum", title="How fast the singular values of attention's output fall off", paper="skyformer",
    where="appendix B, Figure 2", cells=_cells, measure=_measure, tables=_tables, draw=_draw, options=("data", "model"),
    claims=(
        Claim("fast", "appendix B, Figure 2", "the singular values of attention's output decay fast",
              "number 10 is 4e-4 (ListOps) to 6e-3 (Retrieval) of number 1", judge=_decays(10, 1e-2)),
        Claim("tail", "appendix B, Figure 2", "the last of 64 is about 1e-5 of the first",
              "5e-7 (ListOps) to 2e-5 (Retrieval)", judge=_decays(64, 1e-4)),
        Claim("order", "appendix B, Figure 2",
              "harder tasks decay slower: Retrieval and Pathfinder behind Text and ListOps",
              "number 10 of Retrieval 1.2, Pathfinder 0.85, Text 0.23, ListOps 0.07", judge=Judge(
                  _tasks, ahead("Retrieval", of=("Text", "ListOps"), higher=True)
                  & ahead("Pathfinder", of=("Text", "ListOps"), higher=True), shows="{key} {value:.1e}",
                  of="number 10 / number 1", needs="needs models that were trained on these tasks")),
    ),
)  # fmt: skip
