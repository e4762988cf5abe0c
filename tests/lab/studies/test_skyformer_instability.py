import copy
import statistics
from dataclasses import replace

import pytest
import torch

from sparing.store import Store
from sparing_lab.studies._arena import EXACT, KERNELIZED, NYSTROM, SKYFORMER, TASKS, Setup, config_of
from sparing_lab.studies._skyformer_instability import (
    AFTER,
    BEFORE,
    READ,
    REDRAWN,
    RELATIVE,
    apart,
    moved_by,
    plain_start,
    redraw,
    scores,
    states,
)
from sparing_lab.studies.run import run
from sparing_lab.studies.skyformer_instability import STUDY, TABLE, ratios
from sparing_lab.studies.study import Settings
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from sparing_lab.training.objectives import inputs_of
from tests.support.verdicts import changed, others, shown, verdict

NAME = "skyformer-instability"


def table(seeds=(0.99, 1.0, 1.01)):
    """The paper's table as if it were measured, for every read-out; seeds: factors by which they differ."""
    found = []
    for task in TASKS:
        for seed, factor in enumerate(seeds):
            for read in READ:
                found.append({"task": task, "seed": seed, "read": read, "side": EXACT, "scores": [2.0, 4.0]})
                for side, paper in TABLE.items():
                    scaled = [2 * factor * paper[task], 4 * factor * paper[task]]
                    found.append({"task": task, "seed": seed, "read": read, "side": side, "scores": scaled})
    return found


def test_the_papers_own_table_meets_the_criteria():
    assert others(NAME, table()) == {}


def test_tables_fit_the_page():
    shown(NAME, changed(table(), of(SKYFORMER, REDRAWN), scores=[200_000.0, 400_000.0]))


def of(side, read=AFTER, tasks=tuple(TASKS)):
    return lambda row: row["side"] == side and row["read"] == read and row["task"] in tasks


@pytest.mark.parametrize(
    ("key", "where", "ratio", "said"),
    [
        ("stable", of(KERNELIZED, tasks=("Text",)), 1.01, "same shape"),
        ("stable", of(SKYFORMER), 1.5, "does not"),
        ("size", of(KERNELIZED), 0.9, "same shape"),
        ("size", of(SKYFORMER), 0.3, "does not"),
        ("nystrom", of(NYSTROM, tasks=("Image",)), 1.2, "same shape"),
        ("nystrom", of(NYSTROM), 0.7, "does not"),
        ("alike", of(SKYFORMER, tasks=("Image",)), 0.8, "same shape"),
        ("alike", of(SKYFORMER), 0.2, "does not"),
        ("order", of(SKYFORMER, tasks=("Image",)), 0.85, "same shape"),
        ("order", of(KERNELIZED, tasks=("Image", "Retrieval")), 0.95, "does not"),
        ("before", of(KERNELIZED, BEFORE), 1000.0, "does not"),
        ("relative", of(SKYFORMER, RELATIVE, ("Text",)), 1.3, "same shape"),
        ("relative", of(SKYFORMER, RELATIVE), 1.3, "does not"),
        ("redrawn", of(SKYFORMER, REDRAWN), 800.0, "does not"),
    ],
)
def test_other_ratios_get_other_verdicts(key, where, ratio, said):
    assert verdict(NAME, key, changed(table(), where, scores=[2 * ratio, 4 * ratio])) == said


def test_seeds_that_disagree_make_a_low_mean_uncertain():
    wide = table(seeds=(0.3, 1.0, 1.7))
    assert verdict(NAME, "size", wide) == "reproduces"  # the means are the same
    assert verdict(NAME, "stable", wide) == "same shape"
    assert verdict(NAME, "seeds", wide) == "does not"
    apart_ = changed(wide, of(KERNELIZED, tasks=("Image",)), scores=[2 * 0.79, 4 * 0.79])
    assert verdict(NAME, "order", apart_) == "does not"
    assert verdict(NAME, "seeds", table(seeds=(1.0,))) == "not run"


def test_a_ratio_is_the_mean_of_the_steps_ratios():
    rows = [
        {"task": "Text", "seed": 0, "read": AFTER, "side": EXACT, "scores": [1.0, 4.0]},
        {"task": "Text", "seed": 0, "read": AFTER, "side": SKYFORMER, "scores": [3.0, 4.0]},
    ]
    assert ratios(rows, SKYFORMER, AFTER, "Text") == [2.0]  # not 7 / 5


@pytest.fixture(scope="module")
def tiny():
    found = Config(**STUDY.cells(Settings(seeds=1))[1]["configs"][SKYFORMER])
    return replace(found, max_length=64, batch_size=2, method="skyformer(landmarks=8)")


def test_a_score_is_what_a_step_changes(tiny):
    """By hand, for the first two steps."""
    training = Training(tiny)
    plain_start(training.bare, tiny.seed)
    models = [copy.deepcopy(training.bare).eval()]
    wanted = []

    def see(text, done, steps):
        models.append(copy.deepcopy(training.bare).eval())
        if done == 2:
            raise KeyboardInterrupt

    training.tell = see
    with pytest.raises(KeyboardInterrupt):
        training.run()
    for step in range(2):
        chosen = [training.task.train[number] for number in training.batches.batch(step)]
        x = inputs_of(training.task, chosen, [0, 0]).arguments
        old, new = models[step : step + 2]
        with torch.no_grad():
            weights = [torch.cat([weight.flatten() for weight in model.parameters()]) for model in (old, new)]
            moved = float((weights[1] - weights[0]).double().square().sum())
            change = new.encoder(**x) - old.encoder(**x)
        wanted.append(float(change.double().square().sum()) / moved)
    found = scores(tiny, 2)
    assert found[AFTER] == pytest.approx(wanted, rel=1e-3)
    assert {len(each) for each in found.values()} == {2}
    assert min(found[REDRAWN]) > 10 * max(found[AFTER])  # another draw of landmarks moves more than the step


def test_states_are_read_on_both_sides_of_the_last_norm(tiny):
    model = Training(replace(tiny, method="exact")).bare.eval()
    tokens = torch.randint(1, 10, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 12:] = False
    (after,), (before,) = states(model, {"tokens": tokens, "mask": mask})
    assert bool((before[1, 12:] == 0).all() and (after[1, 12:] == 0).all())
    torch.testing.assert_close(model.encoder.norm(before[0]), after[0])
    assert apart([after], [after]) == 0
    assert not redraw(model)  # has nothing to draw


def test_methods_start_from_the_same_weights(tiny):
    models = [Training(replace(tiny, method=method)).bare for method in ("exact", tiny.method)]
    for model in models:
        plain_start(model, 3)
    assert moved_by(*models) == 0
    assert bool((models[0].encoder.layers[0].attention.in_proj_bias != 0).all())
    plain_start(models[1], 4)
    assert moved_by(*models) > 1


def test_the_papers_settings(tmp_path):
    small, *_ = STUDY.cells(Settings())
    assert small["first"] == 20
    for config in small["configs"].values():
        assert (config["num_layers"], config["hidden_size"], config["num_heads"]) == (2, 64, 2)
    with pytest.raises(ValueError, match=r"--data .*imdb/train\*.jsonl.*aan/\*.tsv.*cifar10/\*.npz"):
        STUDY.cells(Settings(scale="paper"))
    for name in ("imdb/train.jsonl", "aan/pairs.tsv", "cifar10/grey.npz"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    cells = STUDY.cells(Settings(scale="paper", data=tmp_path))
    found = {cell["task"]: Config(**cell["configs"][SKYFORMER]) for cell in cells}
    assert [found[task].max_length for task in TASKS] == [4000, 2000, 4000, 1024, 1024]
    assert found["ListOps"].learning_rate_at(999) == pytest.approx(1e-4)  # 1000 steps of warm-up
    assert found["Image"].method == "skyformer(landmarks=128)"
    assert found["Text"].data == str(tmp_path)
    assert found["ListOps"].data is None


def test_the_whole_of_it():
    """One task, two steps, tiny."""
    setup = config_of("ListOps", EXACT, Setup(64, 2, 1e-4, 50, 0.1, 8), seed=0, data=None)
    configs = {
        side: {**vars(setup), "method": method}
        for side, method in {EXACT: "exact", KERNELIZED: "kernel(kind=gaussian, normalize=none)",
                             NYSTROM: "nystrom(landmarks=4)", SKYFORMER: "skyformer(landmarks=8)"}.items()
    }  # fmt: skip
    cells = [{"task": "ListOps", "seed": seed, "first": 2, "of": "", "configs": configs} for seed in range(2)]
    outcome = run(replace(STUDY, cells=lambda settings: cells), Settings(), Store(None))
    rows = outcome.rows
    assert len(rows) == 2 * len(configs) * len(READ)
    assert outcome.judgements["order"].verdict == "not run"
    # Nothing normalises the Gaussian kernel's weights.
    assert statistics.fmean(ratios(rows, KERNELIZED, BEFORE, "ListOps")) > 3
    assert STUDY.tables(rows)[0].rows[0][-1] == "1.01"  # the paper's, first
