import pytest

from sparing_lab.studies._arena import EXACT, KERNELIZED, NYSTROM, SKYFORMER, TASKS
from sparing_lab.studies.skyformer_convergence import SIDES, STUDY, reached
from sparing_lab.studies.study import Settings
from sparing_lab.training.config import Config
from tests.support.verdicts import changed, others, shown, verdict

NAME = "skyformer-convergence"
SECONDS = {EXACT: 4.0, KERNELIZED: 4.0, SKYFORMER: 1.0, NYSTROM: 1.0}  #: of a hundred steps
CONFIG = {"max_length": 64, "max_steps": 400, "batch_size": 8, "data": None}


def curve(losses, seconds):
    return [
        {"step": 100.0 * number, "seconds": seconds * number, "valid_loss": loss}
        for number, loss in enumerate(losses, 1)
    ]


def run(task, side, losses, *, accuracy=0.8, seconds=None):
    points = curve(losses, seconds or SECONDS[side])
    return {
        "what": "train", "task": task, "side": side, "seed": 0, "held": 1000, "chance": 0.5, "accuracy": accuracy,
        "seconds": points[-1]["seconds"], "steps": 400, "curve": points, "config": CONFIG,
    }  # fmt: skip


def told():
    """What the paper says of its curves."""
    found = [run(task, side, [0.9, 0.7, 0.6, 0.5]) for task in TASKS for side in SIDES if task != "Text"]
    found += [run("Text", side, [0.6, 0.65, 0.7, 0.8]) for side in SIDES]
    return changed(found, of(EXACT, "Pathfinder"), accuracy=0.6)


def of(side, *tasks):
    return lambda row: row["side"] == side and row["task"] in (tasks or TASKS)


def test_what_the_paper_says_meets_the_criteria():
    assert others(NAME, told()) == {}


@pytest.mark.parametrize(
    ("where", "said"), [(of(SKYFORMER, "Image"), "same shape"), (of(SKYFORMER), "does not")], ids=["one", "all"]
)
def test_slow_steps_end_late(where, said):
    slow = changed(told(), where, seconds=99.0, curve=curve([0.6, 0.5, 0.5, 0.5], 25.0))
    assert verdict(NAME, "finishes", slow) == said
    assert verdict(NAME, "converges", slow) == said


def test_quick_steps_that_learn_little_are_told_from_quick_convergence():
    late = changed(told(), of(SKYFORMER), curve=curve([0.9] * 9 + [0.5], 1.7), seconds=15.0)
    late = changed(late, of(EXACT), curve=curve([0.5, 0.5, 0.5, 0.5], 4.0))
    late = changed(late, of(KERNELIZED), curve=curve([0.5, 0.5, 0.5, 0.5], 4.0))
    assert verdict(NAME, "finishes", late) == "reproduces"
    assert verdict(NAME, "converges", late) == "does not"
    assert verdict(NAME, "steps", late) == "does not"
    some = changed(told(), of(SKYFORMER, "Image"), curve=curve([0.9, 0.9, 0.9, 0.9, 0.5], 1.0))
    assert verdict(NAME, "steps", some) == "same shape"


def test_the_level_is_what_all_three_reach():
    rows = [
        run("Image", EXACT, [0.9, 0.5, 0.1]),
        run("Image", KERNELIZED, [0.5, 0.4, 0.1]),
        run("Image", SKYFORMER, [0.8, 0.6, 0.5, 0.9]),  # the highest of the lowest
        run("Image", NYSTROM, [2.0, 2.0, 2.0]),  # is beside the point
    ]
    assert [reached(rows, side, "Image", "step") for side in SIDES[:3]] == [200, 100, 300]
    assert reached(rows, EXACT, "Image", "seconds") == 8.0


def test_a_loss_that_falls_to_the_end_is_no_overfitting():
    falling = curve([0.8, 0.7, 0.6, 0.5], 1.0)
    one = changed(told(), of(SKYFORMER, "Text"), curve=falling)
    assert verdict(NAME, "overfits", one) == "same shape"
    rows = told()
    for side in SIDES:
        rows = changed(rows, of(side, "Text"), curve=falling)
    assert verdict(NAME, "overfits", rows) == "does not"
    for noise in ([0.6, 0.5, 0.9, 0.51], [0.8, 0.7, 0.5, 0.9]):  # one high loss is no rise
        assert verdict(NAME, "overfits", changed(rows, of(EXACT, "Text"), curve=curve(noise, 1.0))) == "does not"
    assert verdict(NAME, "overfits", [row for row in told() if row["task"] != "Text"]) == "not run"


def test_pathfinder():
    assert verdict(NAME, "pathfinder", changed(told(), of(EXACT, "Pathfinder"), accuracy=0.79)) == "does not"
    unlearned = changed(told(), lambda row: row["task"] == "Pathfinder", accuracy=0.51)
    assert verdict(NAME, "pathfinder", unlearned) == "not run"
    assert verdict(NAME, "pathfinder", [row for row in told() if row["task"] != "Pathfinder"]) == "not run"


def test_tables_fit_the_page():
    shown(NAME, told())


def test_all_methods_of_a_task_differ_in_their_method_alone():
    cells = STUDY.cells(Settings())
    for task in {cell["task"] for cell in cells}:
        mine = [cell["config"] for cell in cells if cell["task"] == task]
        assert len({str({**config, "method": ""}) for config in mine}) == 1
        assert len({config["method"] for config in mine}) == len(SIDES)
        assert Config(**mine[0]).steps_between_evaluations * 5 == mine[0]["max_steps"]


def test_the_papers_settings(tmp_path):
    with pytest.raises(ValueError, match=r"--data .*cifar10/\*.npz"):
        STUDY.cells(Settings(scale="paper"))
    for name in ("imdb/train.jsonl", "aan/pairs.tsv", "cifar10/grey.npz"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    cells = STUDY.cells(Settings(scale="paper", data=tmp_path))
    assert [cell["task"] for cell in cells[:: len(SIDES)]] == list(TASKS)
    assert {cell["config"]["max_steps"] for cell in cells} == {50_000}
    assert cells[0]["config"]["eval_steps"] == 1000
