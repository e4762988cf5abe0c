import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.store import Store
from sparing_lab.papers import numbers
from sparing_lab.studies import study
from sparing_lab.studies._mca import Problem, ProjectionWork, documents_of, model_of, problem
from sparing_lab.studies.mca_glue import ALPHAS, METHODS
from sparing_lab.studies.run import run
from sparing_lab.studies.study import Settings
from sparing_lab.tasks.glue import TASKS
from tests.support.glue_files import classifier, sentences, write
from tests.support.verdicts import changed, shown, verdict

NAME = "mca-glue"
LENGTHS = {"CoLA": 11.0, "SST-2": 25.0, "RTE": 64.0}
PAPER = numbers("mca", "tables 1 and 2")


@pytest.fixture(autouse=True)
def _forget():
    yield
    for cached in (problem, model_of, documents_of):
        cached.cache_clear()


def work(length, rate, d=768):
    """Of one document padded to 128; rate: r / d of its tokens."""
    return asdict(ProjectionWork(length * rate, length, 128.0, length**2, 128.0**2, d))


def made(task="SST-2", family="BERT", apart=False, rate=0.9):
    """Rows that satisfy every claim but those that arithmetic forbids."""
    base = {"family": family, "model": "m", "task": task, "apart": apart}
    name = TASKS[task].metrics[0]
    rows = [{**base, "method": "exact", "scores": {name: 0.9}, "work": None}]
    for reading in ("padded", "tokens"):
        for method in METHODS:
            for number, alpha in enumerate(ALPHAS):
                for seed in range(3):
                    lost = (0.0, 0.005, 0.02, 0.2)[number] + 0.0005 * seed + 0.001 * (method in ("mean", "drop"))
                    rows.append({
                        **base, "reading": reading, "method": method, "alpha": alpha, "seed": seed,
                        "scores": {name: 0.9 - lost}, "work": work(LENGTHS[task], rate),
                    })  # fmt: skip
    return rows


def at(**wanted):
    return lambda row: all(row.get(name) == value for name, value in wanted.items())


def like_paper():
    """Rows whose savings are those that the paper prints."""
    rows = made("CoLA") + made("SST-2") + made("RTE")
    for task, length in LENGTHS.items():
        for alpha, times in zip(ALPHAS, PAPER["BERT"][task]["flops"], strict=True):
            found = work(length, 128 / times / length)
            rows = changed(rows, lambda row, task=task, alpha=alpha: at(task=task, alpha=alpha)(row), work=found)
    return rows


def test_work_is_counted_in_five_ways():
    found = ProjectionWork(**work(32.0, 0.5))
    assert (found.paper, found.padding, found.real) == (8.0, 4.0, 2.0)
    assert found.weighed == pytest.approx((32 * 768 + 32**2) / (16 * 768 + 32**2))
    assert found.paper_weighed == pytest.approx((128 * 768 + 128**2) / (16 * 768 + 128**2))
    nothing = ProjectionWork(**work(32.0, 1e-12))
    assert nothing.paper_weighed == pytest.approx(7.0), "the limit for BERT: 1 + d / n"
    assert nothing.layer == pytest.approx((12 * 768 + 64) / (11 * 768 + 64))
    both = found + ProjectionWork(**work(64.0, 1.0))
    assert (both.rate, both.tokens, both.slots, both.features) == (80.0, 96.0, 256.0, 768)


@pytest.mark.parametrize("alpha", [0.2, 0.4])
def test_savings_are_held_against_the_papers_for_the_same_tasks(alpha):
    key, rows = f"reduction-{alpha}", like_paper()
    assert verdict(NAME, key, rows) == "reproduces"
    # One task that saves far more, two as printed; then all of them half of what is printed.
    assert verdict(NAME, key, changed(rows, at(task="CoLA", alpha=alpha), work=work(11.0, 0.3))) == "same shape"
    for task, length in LENGTHS.items():
        more = 2 * 128 / length / PAPER["BERT"][task]["flops"][ALPHAS.index(alpha)]
        rows = changed(rows, at(task=task, alpha=alpha), work=work(length, more))
    assert verdict(NAME, key, rows) == "does not"
    assert verdict(NAME, key, made("SST-2")) == "not run", "one task is no mean of tasks"


def test_what_padding_saves_is_not_the_methods():
    rows = like_paper()
    assert verdict(NAME, "own", rows) == "does not"
    own = changed(rows, lambda row: row["work"] is not None, work=work(100.0, 0.1))
    assert verdict(NAME, "own", own) == "reproduces"
    assert verdict(NAME, "own", changed(own, at(task="CoLA", alpha=0.2), work=work(11.0, 0.9))) == "same shape"


def test_tasks_differ_by_their_lengths_or_by_themselves():
    rows = like_paper()
    assert verdict(NAME, "differ", rows) == "does not"
    sparse = changed(rows, at(task="CoLA"), work=work(64.0, 0.1))
    assert verdict(NAME, "differ", sparse) == "reproduces"
    half = changed(rows, at(task="CoLA"), work=work(16.0, 0.5))
    assert verdict(NAME, "differ", half) == "same shape"
    assert verdict(NAME, "differ", made()) == "not run"


@pytest.mark.parametrize(("key", "reading", "alpha"), [
    ("negligible", "padded", 0.2), ("loss-0.4", "padded", 0.4), ("tokens", "tokens", 0.2),
])  # fmt: skip
def test_a_loss_of_more_than_a_point_is_one(key, reading, alpha):
    rows = made("CoLA") + made("SST-2") + made("RTE")
    assert verdict(NAME, key, rows) == "reproduces"
    which = {"method": "independent", "reading": reading, "alpha": alpha}
    one = changed(rows, at(task="SST-2", **which), scores={"accuracy": 0.87})
    assert verdict(NAME, key, one) == "same shape"
    two = changed(one, at(task="RTE", **which), scores={"accuracy": math.nan})
    assert verdict(NAME, key, two) == "does not"
    bare = [{**row, "scores": {"cosine": 1.0}} for row in rows]
    assert verdict(NAME, key, bare) == "not run"


def test_a_score_that_does_not_fall_with_alpha():
    rows = made("CoLA") + made("SST-2")
    assert verdict(NAME, "falls", rows) == "reproduces"
    flat = changed(rows, at(task="SST-2", method="independent", reading="padded"), scores={"accuracy": 0.9})
    assert verdict(NAME, "falls", flat) == "same shape"
    rises = changed(flat, at(task="SST-2", method="independent", reading="padded", alpha=0.6), scores={"accuracy": 1.0})
    assert verdict(NAME, "falls", rises) == "does not"


def test_shared_samples_that_lose_more():
    rows = made()
    assert verdict(NAME, "shared", rows) == "reproduces"
    lost = changed(rows, at(method="shared", reading="padded", alpha=0.4), scores={"accuracy": 0.8})
    assert verdict(NAME, "shared", lost) == "does not"


def test_baselines_that_are_better():
    rows = made()
    assert verdict(NAME, "baselines", rows) == "reproduces"
    mean = changed(rows, at(method="mean"), scores={"accuracy": 0.95})
    assert verdict(NAME, "baselines", mean) == "same shape"
    assert verdict(NAME, "baselines", changed(mean, at(method="drop"), scores={"accuracy": 0.95})) == "does not"


def test_counting_a_h():
    assert verdict(NAME, "cap", made()) == "does not"
    wide = changed(made(), lambda row: row["work"] is not None, work=work(25.0, 0.9, d=10**6))
    assert verdict(NAME, "cap", wide) == "reproduces"


def test_distilbert_beside_bert():
    assert verdict(NAME, "distil", made()) == "not run"
    both = made() + made(family="DistilBERT")
    assert verdict(NAME, "distil", both) == "reproduces"
    assert verdict(NAME, "distil", changed(both, at(family="DistilBERT"), work=work(25.0, 0.7))) == "same shape"
    assert verdict(NAME, "distil", changed(both, at(family="DistilBERT"), work=work(25.0, 0.3))) == "does not"


def test_tables_and_figure_of_whatever_rows():
    tables, figure = shown(NAME, made("CoLA") + made("SST-2", "DistilBERT"), page=120)
    assert list(tables[1].rows[0][:4]) == ["CoLA", "0.2", "11.0", "11.44x"]
    assert all(axes.get_ylabel() and axes.get_legend() is not None for axes in figure.axes)


def test_a_classifier_of_the_users_on_its_task(tmp_path):
    folder = classifier(tmp_path / "bert-SST-2", layers=1)
    settings = Settings(data=write(tmp_path / "data", "SST-2", sentences()), seeds=1, model=str(folder))
    rows = run(study(NAME), settings, Store(None)).rows
    exact, *others = rows
    assert {row["task"] for row in rows} == {"SST-2"}
    assert {row["method"] for row in others} == set(METHODS)
    assert 0 <= exact["scores"]["accuracy"] <= 1
    assert all(row["work"]["tokens"] == 12 * 6 for row in others), "documents x tokens"
    assert all(row["work"]["slots"] == 12 * 128 for row in others)
    drop, mean = (
        next(row["work"]["rate"] for row in others if at(method=name, reading="tokens", alpha=1.0)(row))
        for name in ("drop", "mean")
    )
    assert mean == drop + 12, "the mean's own projection is counted, for each document"


def test_alpha_for_padded_inputs_is_alpha_for_fewer_tokens(tmp_path):
    folder = classifier(tmp_path / "bert-SST-2")
    data = write(tmp_path / "data", "SST-2", sentences(4))
    given = problem(str(folder), "SST-2", data, None)
    rates = [
        given.run(MonteCarlo(alpha=alpha), padded=padded, seed=1)[1].rate
        for alpha, padded in ((8.0, True), (8.0 * 6 / 128, False), (8.0, False), (1e9, False), (0.0, True))
    ]
    assert rates[0] == rates[1] > rates[2], "six tokens each"
    assert rates[3] == pytest.approx(4 * 6 * 2 / 32), "one sample of 32 features for each token"
    assert rates[4] == 4 * 6 * 2, "alpha = 0 projects every token"
    exact, _ = given.run(None, padded=False, seed=0)
    assert given.run(MonteCarlo(alpha=0.0), padded=True, seed=0)[0] == exact
    before = torch.get_rng_state()
    one, two, again = (given._digests(given.sides[0], lambda length: MonteCarlo(alpha=2.0)) for _ in range(3))
    torch.set_rng_state(before)
    assert one[0] != two[0] != again[0], "each run draws its own samples"
    assert given._digests(given.sides[0], lambda length: MonteCarlo(alpha=2.0))[0] == one[0]


def test_pairs_read_apart_are_scored_by_their_similarity():
    """The exact model ranks its own pairs without a fault, and negated scores turn the ranking round."""

    sides = [[{"embedding": [1.0, x]} for x in (0.0, 1.0, 2.0)], [{"embedding": [1.0, 0.0]}] * 3]
    given = Problem(SimpleNamespace(kind="encoder"), (), None, ("spearman", "cosine"))
    vars(given)["exact"] = sides
    assert given.run(None, padded=False, seed=0)[0] == {"spearman": pytest.approx(1.0), "cosine": pytest.approx(1.0)}
    assert given._scores([sides[0][::-1], sides[1]])["spearman"] == pytest.approx(-1.0)


def test_the_paper_scale_names_its_weights_and_wants_its_files(tmp_path):
    with pytest.raises(ValueError, match=r"glue.CoLA.dev\.tsv .*gluebenchmark"):
        study(NAME).cells(Settings(scale="paper"))
    for name in ("SST-2", "MNLI-mm"):
        head = "sentence\tlabel\na\t1\n" if name == "SST-2" else "sentence1\tsentence2\tgold_label\na\tb\tneutral\n"
        write(tmp_path, name, head)
    cells = study(NAME).cells(Settings(scale="paper", data=tmp_path))
    assert {cell["model"] for cell in cells} == {
        "textattack/bert-base-uncased-SST-2", "ishan/bert-base-uncased-mnli",
        "avneet/distilbert-base-uncased-finetuned-sst2", "textattack/distilbert-base-uncased-MNLI",
    }  # fmt: skip
    assert {cell["seed"] for cell in cells if cell["method"] == "shared"} == set(range(128))
    assert {cell["alpha"] for cell in cells if "alpha" in cell} == {0.2, 0.4, 0.6, 1.0}
    weights = numbers("mca", "weights")
    assert set(weights["BERT"]) == set(weights["DistilBERT"]) == set(TASKS) - {"MNLI-mm"}


def test_a_model_that_does_not_say_its_task_or_whose_file_is_missing(tmp_path):
    folder = classifier(tmp_path / "mine", layers=1)
    data = write(write(tmp_path, "SST-2", sentences(2)), "CoLA", "x\t1\t\ta b\n")
    with pytest.raises(ValueError, match="mine has 2 classes and does not say which task"):
        study(NAME).cells(Settings(data=data, model=str(folder)))
    named = classifier(tmp_path / "bert-rte", layers=1)
    with pytest.raises(ValueError, match=r"DATA.glue.RTE.dev\.tsv"):
        study(NAME).cells(Settings(model=str(named)))


def test_an_encoders_classes_are_read_out(tmp_path):
    """A word decides the class, and the read-out learns it; with the labels turned round it is always wrong."""
    folder = str(classifier(tmp_path / "plain", layers=1, encoder=True))
    lines = [(f"{word} {' '.join(chr(97 + (i * k) % 6) for k in (1, 2, 3))}", label)
             for i in range(30) for word, label in (("good", 1), ("bad", 0))]  # fmt: skip
    head = "sentence\tlabel\n"
    write(tmp_path, "SST-2", head + "".join(f"{text}\t{label}\n" for text, label in lines), "train")
    write(tmp_path, "SST-2", head + "".join(f"{text}\t{label}\n" for text, label in lines[7:31]))
    given = problem(folder, "SST-2", tmp_path, None)
    assert given.names == ("accuracy",)
    assert given.run(None, padded=False, seed=0)[0]["accuracy"] >= 0.9
    turned = replace(given, labels=[1 - label for label in given.labels])
    assert turned.run(None, padded=False, seed=0)[0]["accuracy"] <= 0.1
    pairs = problem(folder, "help topics", None, 3, apart=True)
    scores, found = pairs.run(MonteCarlo(alpha=0.0), padded=True, seed=0)
    assert scores == {"spearman": pytest.approx(1.0), "cosine": pytest.approx(1.0)}
    assert found.rate == found.tokens == sum(len(ids) for rows, _ in pairs.sides for ids in rows)


def test_few_documents_are_spread_over_the_file(tmp_path):
    data = write(
        tmp_path, "RTE", "sentence1\tsentence2\tlabel\n" + "".join(f"{i}\tx{i}\tentailment\n" for i in range(9))
    )
    found = documents_of("RTE", data, 3)
    assert (found.texts, found.pairs, len(found.labels)) == (("0", "3", "6"), ("x0", "x3", "x6"), 3)
    assert len(documents_of("RTE", data, 20)) == len(documents_of("RTE", data, None)) == 9


def test_an_encoder_has_a_score_where_it_can(tmp_path):
    data = write(write(tmp_path, "SST-2", sentences(4)), "CoLA", "x\t1\t\ta b\n")
    write(data, "STS-B", "sentence1\tsentence2\tscore\na\tb\t1.0\n")
    cells = study(NAME).cells(Settings(data=data))
    kinds = {(cell["task"], cell["apart"], cell["method"] == "mean") for cell in cells}
    assert {kind[:2] for kind in kinds} == {("CoLA", False), ("SST-2", False), ("STS-B", False), ("STS-B", True)}
    assert {kind[:2] for kind in kinds if kind[2]} == {("STS-B", True)}, "nothing reads out SST-2's classes"
    write(data, "SST-2", sentences(4), "train")
    cells = [cell for cell in study(NAME).cells(Settings(data=data)) if cell["task"] == "SST-2"]
    assert any(cell["method"] == "mean" for cell in cells)
    assert all(cell["train"] for cell in cells)


def test_tuned_classifiers_read_all_documents(tmp_path):
    """Of each task that has one in the data folder; others have no score, or one of an encoder."""
    classifier(tmp_path / "classifiers" / "SST-2", layers=1)
    classifier(tmp_path / "classifiers" / "STS-B", labels=1, layers=1)
    write(tmp_path, "SST-2", sentences(300))
    write(tmp_path, "CoLA", "x\t1\t\ta b\n" * 50)
    write(
        tmp_path,
        "STS-B",
        "sentence1\tsentence2\tscore\n" + "a b\tc d\t1.0\nfilm\tfilm\t5.0\nvery\tbad f\t2.0\ne\tit\t3.0\n" * 50,
    )
    settings = Settings(data=tmp_path, seeds=1)
    cells = study(NAME).cells(settings)
    assert {(cell["family"], cell["task"], cell["documents"], cell["apart"]) for cell in cells} == {
        ("MiniLM", "CoLA", 32, False), ("tuned", "SST-2", 300, False), ("tuned", "STS-B", 200, False),
    }  # fmt: skip
    for task, names in (("SST-2", {"accuracy"}), ("STS-B", {"pearson", "spearman"})):
        exact = next(cell for cell in cells if cell["task"] == task and cell["method"] == "exact")
        found = study(NAME).measure(settings, exact)["scores"]
        assert set(found) == names, "against labels, not against the exact model"
        assert max(found.values()) < 1
    topics = [{**row, "task": "help topics", "scores": {"spearman": 1.0}} for row in made()]
    for key in ("negligible", "loss-0.4", "falls", "tokens", "shared", "baselines"):
        assert verdict(NAME, key, topics) == "not run"
        assert verdict(NAME, key, topics + made("RTE")) == verdict(NAME, key, made("RTE"))


def test_without_data_there_are_the_help_topics():
    cells = study(NAME).cells(Settings())
    assert {(cell["task"], cell["apart"]) for cell in cells} == {("help topics", True)}
    assert isinstance(documents_of("help topics", None, 5).pairs, tuple)
    assert len({cell["data"] for cell in cells}) == 1
