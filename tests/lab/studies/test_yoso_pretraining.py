import math
from dataclasses import replace

import pytest
import torch

from sparing.nn import Encoder
from sparing_lab.studies._yoso_trained import METHODS, YOSO, frequencies, start, started
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_pretraining import HALF, SHARP, STUDY, SUMS, TRIED, _measure
from sparing_lab.tasks import language
from sparing_lab.tasks.trainable import Example, Split, Task
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from tests.support.verdicts import others, shown, verdict

NAME = "yoso-pretraining"
BEHIND = {"softmax": 0.0, "YOSO-16": 0.08, "YOSO-32": 0.05, "YOSO-64": 0.03, "YOSO-E": 0.015, SHARP: 0.005, SUMS: 0.01}


def record(loss, order):
    return {"step": 700.0, "valid_loss": loss, "perplexity": math.exp(loss), "order_loss": order}


@pytest.fixture
def rows():
    """As in the paper: few hashes cost a little, when it is trained and when it is tried."""
    found = []
    for cell in STUDY.cells(Settings()):
        model, more = cell["model"], BEHIND[cell["model"]]
        first, end = record(3.0, HALF), record(2.0 + more, 0.3 + more)
        found.append({**cell, "what": "curve", "curve": [first, end], "frequencies": 25.0})
        found.append({**cell, "what": "longer", "curve": [end, record(1.9 + more, 0.25 + more)]})
        if model in YOSO:
            for hashes in (*TRIED, "E"):
                noise = 0.0 if hashes == "E" else 1 / hashes
                tried = record(2.0 + more + noise, 0.3 + more + noise)
                found.append({**cell, "what": "hashes", "at": str(hashes), "record": tried})
    return found


def raised(rows, by, what, model=None, at=None, quantity="valid_loss"):
    """The rows with that much more at the end."""
    found = []
    for row in rows:
        if row["what"] == what and model in (None, row["model"]) and at in (None, row.get("at")):
            if what == "hashes":
                row = {**row, "record": {**row["record"], quantity: row["record"][quantity] + by}}
            else:
                end = {**row["curve"][-1], quantity: row["curve"][-1][quantity] + by}
                row = {**row, "curve": [*row["curve"][:-1], end]}
        found.append(row)
    assert found != rows
    return found


def test_curves_as_in_the_paper(rows):
    assert others(NAME, rows) == {}


@pytest.mark.parametrize(("key", "quantity"), [("masked", "valid_loss"), ("order", "order_loss")])
@pytest.mark.parametrize(("by", "said"), [(0.05, "same shape"), (0.2, "does not"), (-0.3, "reproduces")])
def test_an_expectation_that_learns_less_does_not_match(rows, key, quantity, by, said):
    assert verdict(NAME, key, raised(rows, by, "curve", "YOSO-E", quantity=quantity)) == said


@pytest.mark.parametrize(("key", "quantity"), [("masked-normalised", "valid_loss"), ("order-normalised", "order_loss")])
@pytest.mark.parametrize(("by", "said"), [(0.05, "same shape"), (0.2, "does not"), (-0.3, "reproduces")])
def test_rows_of_length_1_that_learn_less_are_told(rows, key, quantity, by, said):
    assert verdict(NAME, key, raised(rows, by, "curve", "YOSO-E", quantity=quantity)) == said
    assert verdict(NAME, key, [row for row in rows if row["model"] != SUMS]) == "not run"


@pytest.mark.parametrize(("key", "quantity"), [("masked-hashes", "valid_loss"), ("order-hashes", "order_loss")])
def test_hashes_that_do_not_help_are_told(rows, key, quantity):
    assert verdict(NAME, key, raised(rows, 0.1, "curve", "YOSO-32", quantity=quantity)) == "same shape"
    assert verdict(NAME, key, raised(rows, 0.1, "curve", "YOSO-64", quantity=quantity)) == "does not"
    far = raised(rows, 0.2, "curve", "YOSO-16", quantity=quantity)
    for model in ("YOSO-32", "YOSO-64"):
        far = raised(far, 0.2, "curve", model, quantity=quantity)
    assert verdict(NAME, key, far) == "same shape"


@pytest.mark.parametrize(("key", "quantity"), [("masked-validation", "valid_loss"), ("order-validation", "order_loss")])
def test_hashes_that_end_elsewhere_do_not_converge(rows, key, quantity):
    """As with codes whose collisions are too rare: more of them help, but not towards the expectation."""
    biased = raised(rows, -0.1, "hashes", "YOSO-16", "E", quantity)
    assert verdict(NAME, key, biased) == "same shape"
    assert verdict(NAME, key, raised(rows, 0.1, "hashes", "YOSO-64", "64", quantity)) == "same shape"
    assert verdict(NAME, key, raised(rows, 0.2, "hashes", "YOSO-E", "256", quantity)) == "does not"


@pytest.mark.parametrize(("key", "quantity"), [("masked-longer", "valid_loss"), ("order-longer", "order_loss")])
def test_a_distance_that_widens_is_told(rows, key, quantity):
    assert verdict(NAME, key, raised(rows, 0.05, "longer", "YOSO-16", quantity=quantity)) == "same shape"
    assert verdict(NAME, key, raised(rows, -0.05, "longer", "softmax", quantity=quantity)) == "does not"


def test_bits_that_do_not_help_are_told(rows):
    assert verdict(NAME, "bits", raised(rows, 0.02, "curve", SHARP)) == "does not"
    far = raised(rows, 0.2, "curve", "YOSO-E")
    assert verdict(NAME, "bits", raised(far, 0.15, "curve", SHARP)) == "same shape"
    assert verdict(NAME, "bits", [row for row in rows if row["model"] != SHARP]) == "not run"


def test_nothing_is_said_where_softmax_has_learned_nothing(rows):
    bytes_only = raised(rows, 1.1, "curve", "softmax")
    guessed = raised(rows, 0.38, "curve", "softmax", quantity="order_loss")
    for claim in STUDY.claims:
        said = {name: claim.judge(some).verdict for name, some in (("masked", bytes_only), ("order", guessed))}
        ordered = claim.key.startswith("order")
        assert said["order" if ordered else "masked"] == "not run", claim.key
        assert said["masked" if ordered else "order"] != "not run", claim.key


def test_frequencies_are_the_perplexity_of_a_guess():
    def split(text, count):
        return Split(count, lambda number: Example(torch.tensor([2, *text, 3])))

    task = Task("t", "", "order", 8, 6, split([4, 5] * 500, 3), split([4, 5, 5, 4], 2), mask=1, special=(0, 2, 3))
    assert frequencies(task) == pytest.approx(2.0, rel=0.01)
    assert frequencies(replace(task, valid=split([6, 6], 2))) > 500, "what was never seen surprises"


def test_a_start_is_the_same_for_every_method():
    made = []
    for method in METHODS.values():
        torch.manual_seed(0)
        encoder = Encoder(20, length=32, width=16, method=method)
        start(encoder, tokens=0.12, positions=0.15)
        made.append(encoder)
    for encoder in made[1:]:
        theirs = encoder.state_dict()
        assert all(torch.equal(weight, theirs[name]) for name, weight in made[0].state_dict().items())
    assert float(made[0].tokens.weight.detach().std()) == pytest.approx(0.12, rel=1e-3)
    near, far = ((made[0].positions.weight[10] - made[0].positions.weight[n]).norm() for n in (11, 20))
    assert near < 0.7 * far


TINY = {
    "max_length": 16,
    "hidden_size": 16,
    "num_heads": 1,
    "num_layers": 1,
    "intermediate_size": 16,
    "batch_size": 2,
    "max_steps": 4,
    "eval_steps": 2,
}


@pytest.fixture
def few(monkeypatch):
    """Held-out examples."""
    monkeypatch.setattr(language, "VALID", 16)


@pytest.mark.usefixtures("few")
def test_a_trained_model_is_tried_with_other_hashes_and_longer_texts():
    longer = {"max_length": 32, "batch_size": 2, "max_steps": 2, "eval_steps": 1}
    config = vars(Config("order", "yoso(expectation=True)", **TINY))
    cell = {"model": "YOSO-E", "seed": 0, "hashes": [1, 512], "config": config, "longer": longer, "start": None}
    curve, few, many, expected, after = _measure(Settings(), cell)
    assert [point["step"] for point in curve["curve"]] == [2, 4]
    assert 15 < curve["frequencies"] < 35
    end = curve["curve"][-1]
    assert expected["record"] == pytest.approx({name: end[name] for name in expected["record"]}, rel=1e-6)
    gaps = [abs(row["record"]["valid_loss"] - expected["record"]["valid_loss"]) for row in (few, many)]
    assert gaps[1] < 0.3 * gaps[0]
    assert [point["step"] for point in after["curve"]] == [1, 2]


@pytest.mark.usefixtures("few")
def test_a_run_starts_from_other_weights_with_its_own_method():
    config = Config("order", "yoso(hashes=4)", **TINY)
    first = Training(config)
    first.run()
    again = started(replace(config, method="exact", seed=3), first.bare.state_dict(), first.task)
    theirs = again.bare.state_dict()
    for name, weight in first.bare.state_dict().items():
        assert name.endswith("evaluation_seed") or torch.equal(weight, theirs[name])
    assert again.evaluate()["valid_loss"] != first.evaluate()["valid_loss"]


def test_the_scales_name_their_models_and_data(tmp_path):
    with pytest.raises(ValueError, match=r"needs DATA/\*\.txt .*BookCorpus and English Wikipedia"):
        STUDY.cells(Settings("paper"))
    assert STUDY.cells(Settings(data=tmp_path, together=True))[0]["config"]["data"] is None
    (tmp_path / "books.txt").write_text("text " * 20_000)
    cells = STUDY.cells(Settings("paper", data=tmp_path))
    assert [cell["model"] for cell in cells] == [*METHODS, SUMS]
    config = cells[0]["config"]
    assert (config["hidden_size"], config["num_heads"], config["num_layers"], config["max_length"]) == (
        768,
        12,
        12,
        512,
    )
    assert (config["max_steps"], config["batch_size"], config["learning_rate"], config["data"]) == (
        500_000,
        256,
        1e-4,
        str(tmp_path),
    )
    assert cells[0]["longer"]["max_length"] == 4096
    assert len(STUDY.cells(Settings(seeds=3))) == 3 * (len(METHODS) + 2)
    before = cells[0]["text"]
    (tmp_path / "books.txt").write_text("another text " * 20_000)
    assert STUDY.cells(Settings("paper", data=tmp_path))[0]["text"] != before


def test_tables_and_figure_hold_all_models(rows):
    (ends, tried), figure = shown(NAME, rows)
    assert [row[0] for row in ends.rows] == ["byte frequencies", *BEHIND]
    assert len(tried.rows) == 2 * len(YOSO)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:-1] == list(BEHIND)
