from dataclasses import replace

import pytest
import torch

from sparing_lab.studies._yoso_trained import METHODS, SAMPLED, YOSO
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_glue import STUDY, TABLE_2, TASKS, _measure, tuned_models
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from tests.support.glue_files import classifier, sentences, write
from tests.support.verdicts import changed, shown, verdict

NAME = "yoso-glue"
TUNED = {"softmax": 0.80, "YOSO-16": 0.76, "YOSO-32": 0.77, "YOSO-64": 0.79, "YOSO-E": 0.80}


def curve(score):
    return [{"step": 0.0, "accuracy": 0.5}, {"step": 100.0, "accuracy": score}]


@pytest.fixture
def rows():
    """As in the paper; noise is 5 points."""
    found = []
    for cell in STUDY.cells(Settings()):
        name = cell["name"]
        about = {"metric": "accuracy", "chance": 0.5, "held": 256}
        found.append({**cell, "what": "tuned", "curve": curve(TUNED[name]), **about})
        if name in SAMPLED:
            found.append({**cell, "what": "expectation", "record": {"accuracy": TUNED[name] + 0.01}})
        if name == "softmax":
            found += [{**cell, "what": "zero", "swap": swap, "record": {"accuracy": 0.55}} for swap in YOSO]
            found += [{**cell, "what": "further", "swap": swap, "curve": curve(0.79)} for swap in cell["swaps"]]
    return found


def scored(rows, score, **where):
    """The rows, with another score at the end of those."""
    return changed(
        rows, lambda row: where.items() <= row.items(), curve=curve(score), record={"accuracy": score}
    )  # fmt: skip


def test_scores_as_in_the_paper(rows):
    for key in ("comparable", "hashes", "expectation", "zero", "recovered"):
        assert verdict(NAME, key, rows) == "reproduces", key
    assert verdict(NAME, "values", rows) == "not run"


@pytest.mark.parametrize("name", ["YOSO-64", "YOSO-E"])
def test_what_falls_short_is_not_comparable(rows, name):
    assert verdict(NAME, "comparable", scored(rows, 0.75, what="tuned", name=name)) == "same shape"
    assert verdict(NAME, "comparable", scored(rows, 0.70, what="tuned", name=name)) == "does not"


def test_hashes_that_do_not_help_are_told(rows):
    assert verdict(NAME, "hashes", scored(rows, 0.70, what="tuned", name="YOSO-64")) == "same shape"
    assert verdict(NAME, "hashes", scored(rows, 0.75, what="tuned", name="YOSO-E")) == "does not"
    for name in YOSO:  # all at chance, whatever their order
        rows = scored(rows, 0.52 if name == "YOSO-E" else 0.5, what="tuned", name=name)
    assert verdict(NAME, "hashes", rows) == "does not"


def test_an_expectation_that_costs_something_is_told(rows):
    assert verdict(NAME, "expectation", scored(rows, 0.72, what="expectation", name="YOSO-16")) == "same shape"
    assert verdict(NAME, "expectation", scored(rows, 0.60, what="expectation", name="YOSO-16")) == "does not"
    lost = scored(rows, 0.99, what="expectation", name="YOSO-16")
    assert verdict(NAME, "expectation", scored(lost, 0.5, what="expectation", name="YOSO-64")) == "does not"


def test_a_swap_that_costs_little_is_told(rows):
    assert verdict(NAME, "zero", scored(rows, 0.70, what="zero", swap="YOSO-E")) == "same shape"
    for name in YOSO:
        rows = scored(rows, 0.70, what="zero", swap=name)
    assert verdict(NAME, "zero", rows) == "does not"


def test_a_swap_that_does_not_recover_is_told(rows):
    assert verdict(NAME, "recovered", scored(rows, 0.70, what="further")) == "same shape"
    assert verdict(NAME, "recovered", scored(rows, 0.60, what="further")) == "does not"
    better = scored(rows, 0.72, what="zero", swap="YOSO-32")
    assert verdict(NAME, "recovered", scored(better, 0.73, what="further")) == "does not", "that is noise"


def test_nothing_is_said_where_softmax_has_learned_nothing(rows):
    poor = scored(rows, 0.54, what="tuned", name="softmax")
    for key in ("comparable", "hashes", "expectation", "zero", "recovered"):
        assert verdict(NAME, key, poor) == "not run", key


def test_the_papers_scores_are_held_against_its_table(rows):
    bert = [{**row, "model": "bert-base-uncased", "task": "RTE"} for row in rows]
    for name in METHODS:
        bert = scored(bert, TABLE_2[name]["RTE"] / 100 + 0.01, what="tuned", name=name)
    assert verdict(NAME, "values", bert) == "reproduces"
    assert verdict(NAME, "values", scored(bert, 0.67, what="tuned", name="softmax")) == "same shape"
    assert verdict(NAME, "values", scored(bert, 0.60, what="tuned", name="softmax")) == "does not"


def test_the_best_of_several_runs_counts(rows):
    worse = [{**row, "curve": curve(0.6)} for row in rows if row["what"] == "tuned"]
    (case,) = tuned_models([*rows, *worse])
    assert case.tuned("softmax") == 0.80
    assert case.kept(0.65) == pytest.approx(0.5)


@pytest.fixture
def small(tmp_path):
    """A model of two layers, and files of SST-2."""
    for split in ("train", "dev"):
        write(tmp_path, "SST-2", sentences(24), split)
    return str(classifier(tmp_path / "model", encoder=True)), tmp_path


def test_a_small_model_is_tuned_tried_and_swapped(small):
    model, data = small
    settings = Settings(data=data, model=model)
    cells = STUDY.cells(settings)
    assert [(cell["task"], cell["name"]) for cell in cells] == [("SST-2", name) for name in METHODS]

    def shortened(cell):
        config = {**cell["config"], "max_steps": 2, "eval_steps": 2, "batch_size": 4}
        return {**cell, "config": config, "further": 1, "held": 20}

    tuned, *zero, further = _measure(settings, shortened(cells[0]))
    assert tuned["held"] == 20, "the first ones"
    assert tuned["chance"] == pytest.approx(0.5)
    assert [row["swap"] for row in zero] == list(YOSO)
    assert [point["step"] for point in further["curve"]] == [0, 1]
    swapped = next(row for row in zero if row["swap"] == further["swap"])
    assert further["curve"][0]["valid_loss"] == swapped["record"]["valid_loss"], "it starts from the swapped model"
    assert swapped["record"]["valid_loss"] != tuned["curve"][-1]["valid_loss"]
    tuned, expected = _measure(settings, shortened(cells[1]))
    assert expected["what"] == "expectation"
    assert expected["record"]["valid_loss"] != tuned["curve"][-1]["valid_loss"]


def test_each_step_of_tuning_draws_anew_and_an_evaluation_does_not(small):
    model, data = small
    config = Config(
        "glue",
        "yoso(hashes=1)",
        data=str(data),
        part="SST-2",
        pretrained=model,
        batch_size=4,
        max_steps=2,
        max_length=16,
    )
    training = Training(config)
    tokens = torch.stack([training.task.train[0].tokens] * 2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    training.bare.train()
    with torch.no_grad():
        assert not torch.equal(training.bare(tokens, mask), training.bare(tokens, mask))
    assert training.evaluate() == training.evaluate()
    fixed = Training(replace(config, method="yoso(expectation=True)"), task=training.task)
    with torch.no_grad():
        assert torch.equal(fixed.bare.train()(tokens, mask), fixed.bare(tokens, mask))


def test_the_scales_name_their_models_tasks_and_files(small, tmp_path_factory):
    _, data = small
    with pytest.raises(ValueError, match=r"MRPC needs DATA/glue/MRPC/train.tsv .*gluebenchmark"):
        STUDY.cells(Settings("paper"))
    with pytest.raises(ValueError, match=r"MRPC needs .*MRPC/train.tsv .*gluebenchmark"):
        STUDY.cells(Settings("paper", data=data))
    empty = tmp_path_factory.mktemp("empty")
    assert STUDY.cells(Settings(data=empty, together=True))[0]["task"] == "pairs"
    assert {cell["model"] for cell in STUDY.cells(Settings())} == {"minilm"}


def test_the_papers_settings(small, monkeypatch):
    from sparing_lab.studies import yoso_glue

    monkeypatch.setattr(yoso_glue, "_fingerprint", lambda settings, task: task)
    cells = STUDY.cells(Settings("paper", data=small[1]))
    assert {(cell["task"], cell["model"]) for cell in cells if cell["name"] == "YOSO-64"} == {
        (task, "bert-base-uncased") for task in TASKS
    }
    roberta = {cell["task"] for cell in cells if cell["model"] == "roberta-base"}
    assert roberta == {"SST-2", "QQP", "MNLI", "MNLI-mm"}
    rte = [cell["config"] for cell in cells if (cell["task"], cell["name"]) == ("RTE", "YOSO-E")]
    assert {(config["batch_size"], config["learning_rate"]) for config in rte} == {
        (batch, rate) for batch in (8, 16, 32) for rate in (2e-5, 3e-5, 4e-5, 5e-5)
    }
    assert {config["epochs"] for config in rte} == {4.0}
    (qqp,) = [cell["config"] for cell in cells if (cell["task"], cell["name"]) == ("QQP", "YOSO-E")]
    assert (qqp["batch_size"], qqp["learning_rate"]) == (32, 3e-5)


def test_tables_and_figure_hold_all_methods(rows):
    (tuned, swapped), _ = shown(NAME, rows)
    assert [row[1] for row in tuned.rows] == [*METHODS, "chance"]
    assert [row[1] for row in swapped.rows] == list(YOSO)
    shown(NAME, [{**row, "task": "SST-2"} for row in rows])
