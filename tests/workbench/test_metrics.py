"""Scores against labels, and what a comparison makes of them."""

import math

import pytest
import torch

from sparing import documents
from sparing.documents import Documents
from sparing.report.page import page
from sparing.report.table import show
from sparing.report.terminal import Terminal
from sparing.workbench.comparison.compare import compare
from sparing.workbench.estimate import estimate, jackknife, proportion
from sparing.workbench.metrics import (
    accuracy,
    f1,
    matthews,
    metric_of,
    metrics_of,
    nearest_accuracy,
    pearson,
    scores,
    spearman,
)
from tests.support.small_models import TEXTS, classifier, subject

QUICK = {"methods": ["window(size=2)"], "length": 60, "rounds": 1, "jobs": 1, "lengths": False, "batch_size": 1}


LABELLED = Documents("labelled", tuple(TEXTS), (0, 1, 0, 1, 0))


def test_few_documents_that_agree_do_not_show_that_all_do():
    """Counts that are all the same have a spread of 0, and an interval all the same."""
    one = classifier(3)
    row = compare(one, TEXTS, metric="agreement", **{**QUICK, "methods": ["multipole(tolerance=0.9, block=16)"]}).rows[
        0
    ]
    assert (row.change.mean, row.verdict) == (0.0, "cannot tell")
    assert row.change.high == pytest.approx(1 - 0.025 ** (1 / 5))
    row = compare(
        one, LABELLED, metric="accuracy", **{**QUICK, "methods": ["multipole(tolerance=0.9, block=16)"]}
    ).rows[0]
    assert row.change.most == pytest.approx(1 - 0.025 ** (1 / 5))
    assert proportion(3, 10).low < 0.3 < proportion(3, 10).high
    assert proportion(10, 10).high == 1.0


def test_an_oracle_on_two_documents_has_no_neighbours():
    found = compare(
        subject(), TEXTS, metric="neighbours", **{**QUICK, "methods": ["window(size=4)", "top_keys(keys=4)"]}
    )
    assert [row.change is None for row in found.rows] == [False, True]
    assert type(found).from_json(found.to_json()) == found
    page(found)


def ends(classes, exact, labels):
    rows = zip(classes, exact, labels, strict=True)
    size = {"classes": max(*classes, *labels, 1) + 1}
    return [{"class": float(a), "exact_class": float(b), "label": float(c), **size} for a, b, c in rows]


def test_accuracy_and_f1_by_hand():
    known = ends([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0])
    assert (accuracy(known, "exact_"), accuracy(known, "")) == (1.0, 0.5)
    assert f1(known, "exact_") == 1.0
    assert f1(known, "") == pytest.approx(2 * 1 / (2 + 2))
    many = ends([0, 1, 2, 2], [0, 1, 2, 2], [0, 1, 2, 1])
    assert f1(many, "") == pytest.approx((1 + 2 / 3 + 2 / 3) / 3), "macro, with more than two classes"
    odd = ends([0, 1, 2, 1], [0, 1, 0, 1], [0, 1, 0, 1])
    assert f1(odd, "exact_") == 1.0
    assert f1(odd, "") == pytest.approx((2 / 3 + 1) / 2), "of the labels' classes on both sides"
    assert math.isnan(f1(ends([0, 0], [0, 0], [0, 0]), "")), "where nothing is class 1 it says nothing"


def test_rank_correlation_with_labels():
    from scipy.stats import spearmanr

    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 12, generator=random).double()
    known = [{"score": float(a), "exact_score": float(b), "label": float(b)} for a, b in zip(x, y, strict=True)]
    assert spearman(known, "exact_") == pytest.approx(1.0)
    assert spearman(known, "") == pytest.approx(float(spearmanr(x, y).statistic))
    assert math.isnan(spearman([{"score": 1.0, "label": float(i)} for i in range(3)], "")), "a constant has no rank"


def test_correlations_that_glue_asks_for():
    # 3 true positives, 1 false one, 1 missed, 2 true negatives
    known = ends([1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0, 0])
    assert matthews(known, "exact_") == pytest.approx(1.0)
    assert matthews(known, "") == pytest.approx((3 * 2 - 1 * 1) / (4 * 4 * 3 * 3) ** 0.5)
    assert matthews(ends([0, 0], [0, 1], [0, 1]), "") == 0.0, "one class for everything knows nothing"
    many = ends([0, 1, 2, 2], [0, 1, 2, 1], [0, 1, 2, 1])
    assert matthews(many, "exact_") == pytest.approx(1.0)
    assert 0 < matthews(many, "") < 1
    scored = [{"score": x, "exact_score": -2 * x, "label": x**2} for x in (1.0, 2.0, 4.0)]
    assert pearson(scored, "") == -pearson(scored, "exact_") == pytest.approx(0.9897433186107870)
    assert math.isnan(pearson([{"score": 1.0, "label": float(i)} for i in range(3)], ""))


def test_an_interval_by_leaving_out_one():
    values = [0.3, -1.0, 2.5, 0.1]
    mean = jackknife(lambda some: sum(some) / len(some), values)
    assert (mean.mean, mean.low, mean.high) == pytest.approx((lambda e: (e.mean, e.low, e.high))(estimate(values)))
    assert jackknife(lambda some: math.fsum(some), [1.0]).low is None


def test_a_classifier_against_labels():
    one = classifier(3)
    rows, _ = one.encode(TEXTS, 60)
    with torch.no_grad():
        exact = [int(one.run(ids).logits.argmax()) for ids in rows]
    given = Documents("labelled", tuple(TEXTS), tuple(exact))
    row = compare(one, given, metric="accuracy", **QUICK).rows[0]
    assert row.end["exact_accuracy"] == row.end["exact_f1"] == 1.0
    assert row.change.mean == pytest.approx(1 - row.end["accuracy"])
    names = tuple(one.model.config.id2label[label] for label in exact)
    assert compare(one, Documents("named", tuple(TEXTS), names), metric="f1", **QUICK).rows[0].end == row.end
    for bad in ("no such", ["LABEL_1"], "nan"):
        with pytest.raises(ValueError, match=r"is not a number, nor a class of the model, such as 'LABEL_0'"):
            compare(one, Documents("bad", tuple(TEXTS), (bad,) * 5), **QUICK)


def test_a_score_against_labels():
    one = classifier(1)
    rows, _ = one.encode(TEXTS, 60)
    with torch.no_grad():
        exact = tuple(float(one.run(ids).logits) for ids in rows)
    row = compare(one, Documents("scores", tuple(TEXTS), exact), metric="spearman", **QUICK).rows[0]
    assert row.end["exact_spearman"] == pytest.approx(1.0)
    assert "accuracy" not in row.end


def test_pairs_of_texts():
    """How similar the texts of a pair are, exactly and approximated, and their change: the mean of both."""
    import sparing

    one = subject()
    pairs = tuple(text[::-1] for text in TEXTS)
    given = Documents("pairs", tuple(TEXTS), (0.1, 0.5, 0.2, 0.9, 0.4), pairs=pairs)
    row = compare(one, given, metric="spearman", **QUICK).rows[0]
    assert {"score", "exact_score", "spearman", "exact_spearman"} <= set(row.end)
    assert "accuracy" not in row.end, "a label of a pair is not a class"

    def mean_similarity():
        found = []
        for text, pair in zip(TEXTS, pairs, strict=True):
            (a, b), _ = one.encode([text, pair], 60)
            with torch.no_grad():
                x, y = (one.run(ids).last_hidden_state[0].double().mean(0) for ids in (a, b))
            found.append(float(torch.nn.functional.cosine_similarity(x, y, dim=0)))
        return sum(found) / len(found)

    assert row.end["exact_score"] == pytest.approx(mean_similarity(), abs=1e-6)
    with sparing.approximate(one.model, "window(size=2)"):
        assert row.end["score"] == pytest.approx(mean_similarity(), abs=1e-6)
    same = Documents("same", tuple(TEXTS), (1.0,) * 5, pairs=pairs)
    assert compare(one, same, metric="spearman", tolerance=0.9, **QUICK).rows[0].verdict == "not safe"
    words = Documents("words", tuple(TEXTS), ("yes", "no", "yes", "no", "no"), pairs=pairs)
    with pytest.raises(ValueError, match=r"label 'yes' is not a number"):
        compare(one, words, metric="spearman", **QUICK)
    with pytest.raises(ValueError, match=r"pair: .* this is a language model"):
        compare(subject("gpt2"), given, **QUICK)


def test_the_nearest_documents_label():
    given = Documents("topics", tuple(TEXTS), ("a", "b", "a", "b", "a"))
    row = compare(subject(), given, metric="accuracy", **QUICK).rows[0]
    assert 0 <= row.end["exact_accuracy"] <= 1
    assert row.change.mean == pytest.approx(row.end["exact_accuracy"] - row.end["accuracy"])
    near = [{"exact_neighbour_label": 1.0, "neighbour_label": 0.0, "label": 1.0}]
    assert (nearest_accuracy(near, "exact_"), nearest_accuracy(near, "")) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["cosine", "neighbours"])
def test_metrics_of_an_encoder_without_labels(name):
    row = compare(subject(), TEXTS, metric=name, **QUICK).rows[0]
    assert row.change.mean == pytest.approx(1 - row.end["cosine" if name == "cosine" else "neighbours"])


def test_the_agreement_of_a_language_model():
    row = compare(subject("llama"), TEXTS, metric="agreement", **QUICK).rows[0]
    assert row.change.mean == pytest.approx(1 - row.end["agreement"])


def test_metrics_that_a_model_or_its_documents_do_not_have():
    with pytest.raises(
        ValueError, match=r"metric='accuracy' is not one of perplexity, agreement, needle, which a model"
    ):
        compare(subject("llama"), TEXTS, metric="accuracy", **QUICK)
    for one, name, message in (
        (classifier(3), "accuracy", "labels: name their column with --label"),
        (classifier(1), "agreement", "a model with classes, and this one has a score"),
        (classifier(3), "spearman", "a model with a score, or pairs of texts"),
        (subject(), "spearman", "labels"),
    ):
        with pytest.raises(ValueError, match=f"metric='{name}' needs {message}"):
            compare(
                one, TEXTS if message != "a model with a score, or pairs of texts" else LABELLED, metric=name, **QUICK
            )
    with pytest.raises(ValueError, match=r"metric='neighbours' needs at least three documents"):
        compare(subject(), TEXTS[:2], metric="neighbours", **QUICK)
    assert next(iter(metrics_of("encoder"))) == metric_of("encoder", None).name == "cosine"
    assert scores("classifier", ends([1], [1], [1])) == {
        "exact_accuracy": 1.0, "accuracy": 1.0, "exact_f1": 1.0, "f1": 1.0, "exact_matthews": 0.0, "matthews": 0.0,
    }  # fmt: skip
    assert scores("classifier", [{"change": 0.0}]) == {}


def test_each_method_shows_its_score_and_what_it_loses(capsys):
    found = compare(classifier(3), LABELLED, **{**QUICK, "methods": ["window(size=2)", "top_keys(keys=2)"]})
    show(found, console=Terminal(width=100))
    out = capsys.readouterr().out
    table = [line.strip() for line in out[out.index("Against the labels") :].splitlines()]
    end = found.rows[0].end
    (exact,) = [line.split() for line in table if line.startswith("the model's own ")][:1]
    (window,) = [line.split() for line in table if line.startswith("window(size=2)")][:1]
    assert exact[3] == f"{end['exact_accuracy']:.4f}"
    assert window[1:3] == [f"{end['accuracy']:.4f}", f"{end['exact_accuracy'] - end['accuracy']:.4f}"]
    scores = "\n".join(table[: table.index(next(line for line in table if line.startswith("Lost:")))])
    assert "top_keys" not in scores, "an oracle sees fewer documents"


def test_short_documents_and_those_that_the_model_would_cut_are_said(tmp_path, capsys):
    (note,) = compare(subject(), ["a few words"] * 3, **QUICK).notes
    assert "half of them have 11 tokens or fewer" in note
    assert note.endswith("nothing about longer ones."), "there is no file to read as a whole"
    (tmp_path / "book.txt").write_text("a few words\n\n" * 3)
    book = documents.read([tmp_path / "book.txt"])
    (note,) = compare(subject(), book, **QUICK).notes
    assert note.endswith("read them with --whole (sparing.documents.read(..., whole=True)).")
    long = compare("minilm", ["some words " * 300, "other words " * 300], **{**QUICK, "length": 300})
    assert long.notes == (
        "sentence-transformers cuts texts at 256 tokens for this model (max_seq_length); these documents have up to "
        "300.",
    )
    show(long, console=Terminal(width=100))
    assert "cuts texts at 256 tokens" in capsys.readouterr().out
    assert compare("minilm", ["some words " * 300, "other words " * 300], **{**QUICK, "length": 200}).notes == ()
