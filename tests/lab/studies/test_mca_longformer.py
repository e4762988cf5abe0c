import json
from dataclasses import asdict

import pytest
import torch

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.models import Subject
from sparing.workbench.outputs import digest
from sparing_lab.studies import mca_longformer, study
from sparing_lab.studies._mca import ProjectionWork
from sparing_lab.studies._mca_longformer import compare, micro_f1, visible_keys
from sparing_lab.studies._mca_longformer import run as run_all
from sparing_lab.studies.study import Settings
from sparing_lab.tasks.longformer import from_bert
from tests.support.verdicts import changed, others, shown, verdict

NAME = "mca-longformer"


def work(saved, tokens=1000.0):
    return asdict(ProjectionWork(tokens / saved, tokens, tokens, 100.0, 100.0, 16))


def row(task, alpha, attention, counts, method, **other):
    saved = dict(zip(mca_longformer.ALPHAS, mca_longformer.REDUCTIONS["IMDB"], strict=True))[alpha]
    made = {"all": work(saved), "local": work(saved), "change": alpha / 100, "neighbours": 1.0}
    given = {"task": task, "documents": 3, "tokens": 99, "attention": attention, "counts": counts, "method": method}
    return {**given, "alpha": alpha, "seed": 0, "length": 80.0, **made, **other}


@pytest.fixture
def rows():
    plan = [("window", "length", "independent"), ("full", "length", "independent")]
    plan += [("window", "visible", method) for method in mca_longformer.METHODS]
    return [
        row("IMDB", alpha, *each, scores={"exact_accuracy": 0.9, "accuracy": 0.9 - alpha / 100})
        for each in plan for alpha in mca_longformer.ALPHAS
    ]  # fmt: skip


def counted(counts):
    return lambda row: row["attention"] == "window" and row["counts"] == counts and row["method"] == "independent"


def test_rows_that_satisfy_all_claims(rows):
    assert others(NAME, rows) == {}


def test_reductions_that_do_not_grow(rows):
    assert verdict(NAME, "grows", changed(rows, counted("visible"), all=work(5.0))) == "does not"


def test_fewer_than_three_times(rows):
    few = changed(rows, counted("length"), all=work(2.9))
    assert verdict(NAME, "three", few) == "same shape"
    assert verdict(NAME, "three", changed(few, counted("visible"), all=work(2.9))) == "does not"


def test_other_reductions_than_the_papers(rows):
    half = [{**row, "all": work(row["all"]["tokens"] / row["all"]["rate"] / 2)} for row in rows]
    assert verdict(NAME, "table", half) == "same shape"
    assert verdict(NAME, "table", changed(rows, counted("length"), all=work(5.0))) == "does not"
    assert verdict(NAME, "table", changed(rows, lambda row: True, task="help topics")) == "not run"


def test_a_loss_at_the_least_alpha(rows):
    def least(row):
        return counted("length")(row) and row["alpha"] == 0.2

    bad = {"exact_accuracy": 0.9, "accuracy": 0.88}
    assert verdict(NAME, "accuracy", changed(rows, least, scores=bad)) == "does not"
    encoder = [{name: value for name, value in row.items() if name != "scores"} for row in rows]
    assert verdict(NAME, "accuracy", encoder) == "same shape", "a cosine is no accuracy"
    assert verdict(NAME, "accuracy", changed(encoder, least, change=0.02)) == "does not"


def test_a_loss_that_does_not_grow(rows):
    def at(alpha):
        return lambda row: counted("length")(row) and row["alpha"] == alpha

    same = {"exact_accuracy": 0.9, "accuracy": 0.9}
    assert verdict(NAME, "trade", changed(rows, at(0.6), scores=same)) == "same shape"
    assert verdict(NAME, "trade", changed(rows, counted("length"), scores=same)) == "does not"


def test_a_window_that_takes_the_saving_away(rows):
    less = changed(rows, counted("length"), local=work(1.5))
    assert verdict(NAME, "composes", less) == "same shape"
    assert verdict(NAME, "composes", changed(less, counted("visible"), local=work(1.5))) == "does not"
    alone = [row for row in rows if row["attention"] == "window"]
    assert verdict(NAME, "composes", alone) == "not run"


def test_the_figure_and_the_tables_take_all_rows(rows):
    (table, _), figure = shown(NAME, [*rows, *changed(rows, lambda row: True, task="help topics")])
    assert len(figure.axes) == 4
    assert len(table.rows) == len(rows)
    assert table.rows[0][-1] == "3.67x"


def bert(width=16):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = BertConfig(**sizes, vocab_size=50, max_position_embeddings=64)
    return Subject("bert", BertModel(config, add_pooling_layer=False).eval(), None)


@pytest.fixture(scope="module")
def windowed():
    return from_bert(bert(), window=8, length=64)


DOCUMENTS = [torch.arange(1, 1 + length) for length in (40, 32, 33)]


def run(subject, visible=False, documents=DOCUMENTS, **method):
    return run_all(subject, documents, MonteCarlo(**method), visible=visible, seed=0)


def test_nothing_sampled_is_the_exact_model(windowed):
    with torch.no_grad():
        exact = [digest(windowed, ids, windowed.run(ids)) for ids in DOCUMENTS]
    found, done = run(windowed, alpha=0.0)
    close = compare("encoder", exact, found, None)
    assert close["change"] < 1e-6
    assert close["neighbours"] == 1
    assert done["all"].rate == done["all"].tokens == 2 * 2 * (40 + 32 + 33)
    assert done["all"].slots == 2 * 2 * (40 + 32 + 40), "padded to a multiple of the window"
    assert done["local"].rate == done["local"].tokens == 2 * (40 + 32 + 33)
    rough, fewer = run(windowed, alpha=20.0)
    assert fewer["all"].rate < done["all"].rate / 2
    assert compare("encoder", exact, rough, None)["change"] > 100 * close["change"]


def test_pairs_are_those_of_the_mask(windowed):
    place = torch.arange(40)
    seen = (place - place[:, None]).abs() <= 4
    seen[0] = seen[:, 0] = True
    _, done = run(windowed, documents=DOCUMENTS[:1], alpha=1.0)
    assert done["all"].pairs == 2 * int(seen.sum())
    assert done["local"].pairs == 2 * int(seen[1:].sum())
    _, full = run(bert(), documents=DOCUMENTS[:1], alpha=1.0)
    assert full["all"] == full["local"]
    assert full["all"].pairs == 2 * 40 * 40


def test_counting_the_keys_that_a_token_sees_is_a_larger_alpha(windowed):
    assert visible_keys(windowed, 40) == 10
    assert visible_keys(windowed, 6) == 6
    assert visible_keys(bert(), 40) == 40
    (seen, as_seen), (same, as_same) = (
        run(windowed, visible, DOCUMENTS[:1], alpha=alpha) for visible, alpha in ((True, 1.0), (False, 4.0))
    )
    assert seen == same
    assert as_seen == as_same
    assert as_seen["all"].rate < run(windowed, documents=DOCUMENTS[:1], alpha=1.0)[1]["all"].rate


def test_a_mean_costs_a_projection_for_each_layer_of_values(windowed):
    done = [run(windowed, documents=DOCUMENTS[:1], alpha=20.0, estimator=kind)[1] for kind in ("drop", "mean")]
    assert done[1]["all"].rate == done[0]["all"].rate + 4
    assert done[1]["local"].rate == done[0]["local"].rate + 2


def test_scores_of_classes():
    digests = [{"logits": logits, "apart": False} for logits in ([1.0, 0.0], [0.0, 1.0])]
    found = compare("classifier", digests, digests[::-1], (0, 1))
    assert (found["scores"]["exact_accuracy"], found["scores"]["accuracy"]) == (1.0, 0.0)
    several = [{"logits": [3.0, -1.0, 2.0], "apart": True}, {"logits": [-3.0, -1.0, -2.0], "apart": True}]
    labels = ((1, 1, 0), (0, 0, 0))
    assert micro_f1(several, labels) == pytest.approx(0.5)
    assert compare("classifier", several, several, labels)["scores"]["f1"] == pytest.approx(0.5)


def test_what_the_scale_of_the_paper_needs(tmp_path):
    with pytest.raises(ValueError, match=r"tuned allenai/longformer-base-4096 on each dataset itself.*--model FOLDER"):
        study(NAME).cells(Settings("paper"))
    with pytest.raises(ValueError, match="model: there is no folder"):
        study(NAME).cells(Settings("paper", model=str(tmp_path / "none" / "imdb")))


def test_which_collection_a_classifier_is_for():
    assert mca_longformer._own("longformer-IMDB", ["HND", "IMDB"]) == "IMDB"
    assert mca_longformer._own("longformer-hnd", []) == "HND"
    assert mca_longformer._own("tuned", ["AAPD"]) == "AAPD"
    with pytest.raises(ValueError, match="tuned does not say which dataset it is for"):
        mca_longformer._own("tuned", ["AAPD", "HND"])


def test_cells_of_a_folder_with_a_classifier(tmp_path, monkeypatch):
    """All alphas for all seeds, on the collection of the classifier."""
    from transformers import LongformerConfig, LongformerForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = LongformerConfig(**sizes, vocab_size=50, attention_window=8, max_position_embeddings=64)
    subject = Subject("tuned-imdb", LongformerForSequenceClassification(config).eval(), None)
    monkeypatch.setattr(mca_longformer, "_subject", lambda name, attention: subject)
    with pytest.raises(ValueError, match=r"IMDB needs .*imdb/test.jsonl .*--data names the folder"):
        study(NAME).cells(Settings("paper", model="tuned-imdb"))
    (tmp_path / "imdb").mkdir()
    (tmp_path / "imdb" / "test.jsonl").write_text(json.dumps({"text": "good", "label": 1}))
    cells = study(NAME).cells(Settings("paper", data=tmp_path, model="tuned-imdb", seeds=2))
    assert {cell["task"] for cell in cells} == {"IMDB"}
    assert {cell["tokens"] for cell in cells} == {4096}
    assert {cell["attention"] for cell in cells} == {"window"}
    sampled = [cell for cell in cells if cell["counts"] == "length"]
    assert sorted({cell["alpha"] for cell in sampled}) == [0.2, 0.4, 0.6, 1.0]
    assert len(sampled) == 8
    assert {cell["documents"] for cell in study(NAME).cells(Settings(data=tmp_path, model="tuned-imdb"))} == {1}


def test_short_documents_are_read_too(tmp_path):
    """Most documents of IMDB and AAPD are shorter than the window; some are spread over the file, none by length."""
    (tmp_path / "imdb").mkdir()
    texts = ["word " * (2000 if number % 3 == 0 else 5 + number) for number in range(18)]
    lines = [json.dumps({"text": text.strip(), "label": number % 2}) for number, text in enumerate(texts)]
    (tmp_path / "imdb" / "test.jsonl").write_text("\n".join(lines))
    some, whole = (mca_longformer._documents("IMDB", tmp_path, most) for most in (6, None))
    assert some.texts == whole.texts[::3]
    assert some.labels == whole.labels[::3]
    four = mca_longformer._documents("IMDB", tmp_path, 4)
    assert [len(text.split()) for text in four.texts] == [2000, 9, 2000, 18]
    assert mca_longformer._documents("IMDB", tmp_path, 99).texts == whole.texts
    cells = study(NAME).cells(Settings(data=tmp_path))
    assert {(cell["task"], cell["documents"]) for cell in cells} == {("IMDB", 6)}
    assert {cell["documents"] for cell in study(NAME).cells(Settings())} == {3}


def test_another_kind_of_model_is_refused(monkeypatch):
    monkeypatch.setattr(mca_longformer, "load", lambda name: bert())
    with pytest.raises(ValueError, match="model: some is a bert model; mca-longformer takes a Longformer classifier"):
        mca_longformer._subject.__wrapped__("some", "window")
