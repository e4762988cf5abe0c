from dataclasses import asdict

import pytest
import torch

from sparing.store import Store
from sparing_lab.studies import study
from sparing_lab.studies._mca import ProjectionWork, documents_of, model_of, problem
from sparing_lab.studies.mca_tradeoff import ROUNDINGS
from sparing_lab.studies.run import run
from sparing_lab.studies.study import Settings
from tests.support.glue_files import classifier, sentences, write
from tests.support.verdicts import changed, shown, verdict

NAME = "mca-tradeoff"
#: Of scores, against the exact one's 0.9.
LOSSES = {0.1: 0.0, 0.2: 0.001, 0.4: 0.005, 0.6: 0.01, 1.0: 0.1}
RATES = {0.1: 0.95, 0.2: 0.8, 0.4: 0.65, 0.6: 0.5, 1.0: 0.3}


@pytest.fixture(autouse=True)
def _forget():
    yield
    for cached in (problem, model_of, documents_of):
        cached.cache_clear()


def work(rate, length=25.0):
    return asdict(ProjectionWork(length * rate, length, 128.0, length**2, 128.0**2, 768))


def made(family="MiniLM", halves=("half",)):
    """Rows that satisfy every claim but "small-loss"."""
    rows = []
    for rounding in ROUNDINGS:
        base = {"family": family, "task": "SST-2", "metric": "accuracy", "rounding": rounding}
        rows.append({**base, "layers": "none", "score": 0.9, "work": None})
        for layers in ("all", *(halves if rounding == "float32" else ())):
            for alpha, lost in LOSSES.items():
                for seed in range(2):
                    less = lost / (2 if layers == "half" else 1)
                    found = {
                        "alpha": alpha,
                        "seed": seed,
                        "score": 0.9 - less - 1e-4 * seed,
                        "work": work(RATES[alpha]),
                    }
                    rows.append({**base, "layers": layers, **found})
    return rows


def at(**wanted):
    return lambda row: all(row.get(name) == value for name, value in wanted.items())


ALL = {"layers": "all", "rounding": "float32"}


def test_a_score_that_does_not_fall_is_not_gradual():
    assert verdict(NAME, "gradual", made()) == "reproduces"
    assert verdict(NAME, "gradual", changed(made(), at(**ALL, alpha=0.4), score=0.95)) == "same shape"
    assert verdict(NAME, "gradual", changed(made(), at(**ALL, alpha=1.0), score=0.91)) == "does not"


def test_a_loss_at_moderate_alpha():
    assert verdict(NAME, "minimal", made()) == "reproduces"
    assert verdict(NAME, "minimal", changed(made(), at(**ALL, alpha=0.6), score=0.87)) == "same shape"
    assert verdict(NAME, "minimal", changed(made(), at(**ALL, alpha=0.4), score=0.87)) == "does not"


@pytest.mark.parametrize("key", ["minimal", "nearly-same", "tipping", "layers"])
def test_what_seeds_do_not_tell_apart_is_not_reproduced(key):
    wild = changed(made(), lambda row: row.get("seed") == 0, score=0.6)
    assert verdict(NAME, key, wild) != "reproduces"


@pytest.mark.parametrize(("key", "enough"), [("nearly-same", 0.7), ("small-loss", 0.35)])
def test_savings_are_those_on_valid_tokens(key, enough):
    good = changed(made(), at(**ALL, alpha=0.4), work=work(enough))
    assert verdict(NAME, key, good) == "reproduces"
    padding = changed(made(), lambda row: row["work"] is not None, work=work(0.95))
    assert verdict(NAME, key, padding) == "same shape", "5.4 times, of which 5.1 are padding"
    lost = changed(good, at(**ALL), score=0.5)
    assert verdict(NAME, key, lost) == "does not"


def test_a_tipping_point_is_a_bend():
    assert verdict(NAME, "tipping", made()) == "reproduces"
    assert verdict(NAME, "tipping", changed(made(), at(**ALL, alpha=0.6), score=0.86)) == "same shape"
    assert verdict(NAME, "tipping", changed(made(), at(**ALL, alpha=1.0), score=0.885)) == "does not"


def test_sixteen_bits_that_change_the_trend():
    assert verdict(NAME, "quantised", made()) == "reproduces"
    assert verdict(NAME, "quantised", changed(made(), at(rounding="bfloat16", alpha=1.0), score=0.1)) == "reproduces"
    off = changed(made(), at(rounding="float16", alpha=0.2, layers="all"), score=0.87)
    assert verdict(NAME, "quantised", off) == "same shape"
    assert verdict(NAME, "quantised", changed(off, at(rounding="float16", alpha=1.0), score=0.5)) == "does not"
    worse = [{**row, "score": row["score"] - 0.5 * (row["rounding"] == "float16")} for row in made()]
    assert verdict(NAME, "quantised", worse) == "reproduces", "an exact model that is worse is no fault of the method"


def test_half_of_the_layers_lose_less():
    assert verdict(NAME, "layers", made()) == "reproduces"
    assert verdict(NAME, "layers", changed(made(), at(layers="half", alpha=1.0), score=0.81)) == "same shape"
    assert verdict(NAME, "layers", changed(made(), at(layers="half", alpha=1.0), score=0.7)) == "does not"
    assert verdict(NAME, "layers", made(halves=())) == "not run"
    two = made("BERT") + changed(made("DistilBERT"), at(**ALL, alpha=1.0), score=0.87)
    assert verdict(NAME, "layers", two) == "reproduces"
    assert verdict(NAME, "layers", made("BERT") + made("DistilBERT")) == "does not"


def test_table_and_figure():
    (table,), figure = shown(NAME, made())
    assert len(table.rows) == 4 * 5
    assert all(axes.get_ylabel() and axes.get_legend() is not None for axes in figure.axes)


def test_a_small_classifier_from_the_first_cell_to_the_verdicts(tmp_path):
    folder = classifier(tmp_path / "bert-SST-2")
    settings = Settings(data=write(tmp_path / "data", "SST-2", sentences(6)), seeds=1, model=str(folder))
    outcome = run(study(NAME), settings, Store(None))
    whole, half = (
        next(row["work"] for row in outcome.rows if at(**{**ALL, "layers": layers}, alpha=0.1)(row))
        for layers in ("all", "half")
    )
    assert (whole["tokens"], half["tokens"]) == (6 * 6 * 2, 6 * 6), "one of two layers"
    assert {row["rounding"] for row in outcome.rows} == set(ROUNDINGS)
    assert all(0 <= row["score"] <= 1 for row in outcome.rows)


def test_weights_are_rounded_and_kept_wide(tmp_path):
    folder = str(classifier(tmp_path / "bert-SST-2", layers=1))
    wide, rough = (dict(model_of(folder, rounding).model.named_parameters()) for rounding in ("float32", "bfloat16"))
    for name, weight in rough.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, wide[name].bfloat16().float())
    assert any(not torch.equal(weight, rough[name]) for name, weight in wide.items())


def test_the_paper_scale_is_sst_2_with_both_models(tmp_path):
    with pytest.raises(ValueError, match=r"glue.SST-2.dev\.tsv .*gluebenchmark"):
        study(NAME).cells(Settings(scale="paper"))
    cells = study(NAME).cells(Settings(scale="paper", data=write(tmp_path, "SST-2", sentences(2))))
    assert {cell["model"] for cell in cells} == {
        "textattack/bert-base-uncased-SST-2", "avneet/distilbert-base-uncased-finetuned-sst2",
    }  # fmt: skip
    assert {cell["seed"] for cell in cells if cell["rounding"] == "float16" and "seed" in cell} == set(range(128))
    assert {cell["alpha"] for cell in cells if "alpha" in cell} >= {0.2, 0.4, 0.6, 1.0}


@pytest.fixture
def tuned(tmp_path):
    """A data folder with tuned classifiers of SST-2 and STS-B."""
    classifier(tmp_path / "classifiers" / "SST-2", layers=1)
    write(tmp_path, "SST-2", sentences(200))
    classifier(tmp_path / "classifiers" / "STS-B", labels=1, layers=1)
    return write(tmp_path, "STS-B", "sentence1\tsentence2\tscore\n" + "a b\tc d\t1.0\nfilm\tfilm\t5.0\n" * 60)


def test_the_tuned_classifier_reads_all_sentences_and_sts_b_beside_them(tuned):
    cells = study(NAME).cells(Settings(data=tuned, seeds=1))
    assert {(cell["family"], cell["task"], cell["documents"]) for cell in cells} == {
        ("tuned", "SST-2", 200), ("tuned on STS-B", "STS-B", 120),
    }  # fmt: skip
    weights = {cell["task"]: cell["weights"] for cell in cells}
    assert weights["SST-2"] != weights["STS-B"]
    few = [cell for cell in cells if cell.get("alpha", 0.4) == 0.4 and cell["rounding"] == "float32"]
    rows = [{**cell, **study(NAME).measure(Settings(data=tuned, seeds=1), cell)} for cell in few]
    assert {(row["task"], row["metric"]) for row in rows} == {("SST-2", "accuracy"), ("STS-B", "pearson")}
    assert {row["work"]["tokens"] for row in rows if row["work"] and row["layers"] == "all"} == {200 * 6, 60 * (7 + 5)}
    (tuned / "classifiers" / "SST-2" / "config.json").unlink()
    write(tuned, "SST-2", sentences(4), "train")
    cells = study(NAME).cells(Settings(data=tuned))
    assert {(cell["family"], cell["documents"]) for cell in cells} == {("MiniLM", 96)}, "a read-out"


def test_a_folder_that_holds_no_classifier_of_the_task_is_named(tuned):
    classifier(tuned / "classifiers" / "SST-2", labels=3)
    with pytest.raises(
        ValueError, match=r"classifiers.SST-2 must hold a model of SST-2, with 2 outputs.*sparing train"
    ):
        study(NAME).cells(Settings(data=tuned))
    model_of.cache_clear()
    classifier(tuned / "classifiers" / "SST-2", encoder=True)
    with pytest.raises(ValueError, match="must hold a model of SST-2"):
        study(NAME).cells(Settings(data=tuned))


def test_claims_are_judged_by_the_first_task():
    beside = [{**row, "task": "STS-B", "metric": "pearson", "score": 0.1} for row in made("tuned on STS-B")]
    rows = made() + beside
    for claim in study(NAME).claims:
        assert verdict(NAME, claim.key, rows) == verdict(NAME, claim.key, made())
    tables, _ = shown(NAME, rows)
    assert [table.title.partition(",")[0] for table in tables] == ["SST-2", "STS-B"]


def test_agreement_with_the_exact_models_own_ranking_judges_no_claim():
    rows = changed(made(), lambda row: True, task="help topics", metric="spearman")
    for claim in study(NAME).claims:
        assert verdict(NAME, claim.key, rows) == "not run"
    (table,), _ = shown(NAME, rows)
    assert table.title.startswith("help topics, spearman")


def test_without_a_training_set_there_are_the_help_topics(tmp_path):
    half = write(tmp_path, "SST-2", sentences(2))
    for settings in (Settings(), Settings(data=half, together=True)):
        assert {cell["task"] for cell in study(NAME).cells(settings)} == {"help topics"}
    with pytest.raises(ValueError, match=r"holds nothing for this study, which looks for SST-2"):
        study(NAME).cells(Settings(data=half))
    write(tmp_path, "SST-2", sentences(4), "train")
    cells = study(NAME).cells(Settings(data=tmp_path))
    assert {cell["task"] for cell in cells} == {"SST-2"}
    assert all(cell["train"] for cell in cells)
