"""Fine-tuning a pretrained encoder on tasks of GLUE's form, and datasets by name."""

import json
from types import SimpleNamespace

import pytest
import torch

from sparing import Unsupported
from sparing_lab.tasks.glue import TASKS
from sparing_lab.tasks.hub import Hub
from sparing_lab.tasks.kinds import KINDS
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training, train
from sparing_lab.training.tuned import export
from tests.support.glue_files import WORDS, classifier

GOOD, BAD = "good film very", "bad film not"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(classifier(tmp_path_factory.mktemp("bert") / "small", layers=1, encoder=True))


def files(folder, task, rows):
    """Rows of text, pair and label as GLUE has them, to learn from and to try it on."""
    about = TASKS[task]
    names = about.header or ("index", *(name for name in (about.text, about.pair, about.label) if name))
    for split in ("train", "dev"):
        lines = [] if about.header else ["\t".join(names)]
        for text, pair, label in rows:
            cells = {about.text: text, about.pair: pair, about.label: label}
            lines.append("\t".join(str(cells.get(name, "x")) for name in names))
        path = about.path(folder, split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return str(folder)


def said_of(words):
    return [(f"{GOOD if k % 2 else BAD} {WORDS[k % 6]} {WORDS[(3 * k) % 6]}", GOOD, words[k % 2]) for k in range(24)]


def tuned(encoder, data, task, **options):
    wanted = {
        "max_steps": 60,
        "batch_size": 8,
        "learning_rate": 5e-3,
        "eval_steps": 60,
        "part": task,
        "data": data,
        **options,
    }
    return train(Config("glue", pretrained=encoder, max_length=16, **wanted))


@pytest.mark.parametrize(
    ("task", "metric", "words"),
    [
        ("SST-2", "accuracy", (0, 1)),
        ("CoLA", "matthews", (0, 1)),
        ("QNLI", "accuracy", ("not_entailment", "entailment")),
        ("STS-B", "pearson", (1.0, 4.0)),
    ],
)
def test_tasks_of_glue_are_learned_and_judged_by_their_metric(task, metric, words, encoder, tmp_path):
    found = tuned(encoder, files(tmp_path, task, said_of(words)), task)
    assert found.task.metric == metric
    assert found.metric > 0.9
    assert found.beats_chance
    if task == "CoLA":
        assert found.task.chance() == 0


def test_labels_that_say_nothing_are_not_learned(encoder, tmp_path):
    rows = [(GOOD, "", k % 2) for k in range(24)]
    found = tuned(encoder, files(tmp_path, "CoLA", rows), "CoLA", max_steps=5)
    assert found.metric == 0
    assert not found.beats_chance


def test_what_is_frozen_does_not_move_and_the_method_is_in_every_layer(encoder, tmp_path):
    config = Config(
        "glue", method="window(size=4)", pretrained=encoder, data=files(tmp_path, "SST-2", said_of((0, 1))), part="sst-2",
        max_length=16, batch_size=8, max_steps=3, frozen="embeddings, pooler",
    )  # fmt: skip
    training = Training(config)
    before = {name: weight.clone() for name, weight in training.bare.state_dict().items()}
    training.run()
    moved = {name for name, weight in training.bare.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved
    assert not any("embeddings" in name or "pooler" in name for name in moved)
    assert all("window" in str(value) for value in training.bare.model.config.sparing["layers"].values())


def test_the_best_model_is_written_for_transformers(encoder, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = files(tmp_path, "QNLI", said_of(("not_entailment", "entailment")))
    config = Config(
        "glue",
        pretrained=encoder,
        data=data,
        part="QNLI",
        max_length=16,
        batch_size=8,
        max_steps=40,
        learning_rate=5e-3,
    )
    found = train(config, tmp_path / "run")
    folder = tmp_path / "run" / "model"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}
    assert model.config.finetuning_task == "QNLI"
    right = 0
    for text, pair, label in said_of(("not_entailment", "entailment")):
        scores = model(**tokenizer(text, pair, return_tensors="pt")).logits
        right += model.config.id2label[int(scores.argmax())] == label
    assert right / 24 == found.metric > 0.9
    train(config, tmp_path / "run")  # a run that is over writes it again
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best.pt", "last.pt", "model"]


def test_without_files_sentences_of_help_are_paired(encoder):
    task = KINDS["glue"].load(length=32, seed=0, data=None, part=None, pretrained=encoder)
    assert task.objective == "class"
    assert len(task.train) > 4 * len(task.valid) > 400
    labels = [task.train[number].label for number in range(len(task.train))]
    assert 0.45 < sum(labels) / len(labels) < 0.55
    assert max(task.train.lengths) == 32
    example = task.train[0]
    assert example.segments.tolist() == sorted(example.segments.tolist())
    assert example.segments.max() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"part": "SST-2"}, r"part='SST-2' needs files"),
        ({"data": "{folder}"}, r"part is missing: pass a task of GLUE, one of CoLA, SST-2"),
        ({"data": "{folder}", "part": "SST-3"}, r"part='SST-3' is not a task of GLUE"),
        ({"data": "{folder}", "part": "RTE"}, r"RTE needs .*train.tsv"),
        ({"pretrained": "no/such/folder"}, r"pretrained='no/such/folder' cannot be loaded"),
        ({"pretrained": "smollm2"}, r"pretrained='smollm2' is not an encoder"),
        (
            {"frozen": "embedings"},
            r"frozen='embedings': no parameter has 'embedings' in its name; their names contain .*embeddings",
        ),
        ({"frozen": "model"}, r"frozen='model' freezes every parameter"),
    ],
)
def test_bad_settings_of_tuning_are_refused(options, said, encoder, tmp_path):
    given = {name: value.format(folder=tmp_path) for name, value in options.items()}
    with pytest.raises(ValueError, match=said):
        Training(Config("glue", max_length=16, batch_size=8, max_steps=1, **{"pretrained": encoder, **given}))


def test_a_method_without_gradient_is_refused(encoder):
    with pytest.raises(Unsupported, match="no gradient for queries and keys"):
        Training(Config("glue", method="top_keys(keys=4)", pretrained=encoder))


def test_part_belongs_to_glue_or_the_hub():
    with pytest.raises(ValueError, match="part='SST-2' is only for glue"):
        Config("causal", part="SST-2").load()


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A folder that the library of datasets reads as it reads the hub: files with splits in their names."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def make(**splits):
        folder = tmp_path / "set"
        folder.mkdir()
        for name, rows in splits.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"hub:{folder}"

    return make


def test_datasets_of_the_hub(dataset):
    rows = [{"text": f"{'yes' if k % 3 else 'no'} {k}", "label": k % 3} for k in range(30)]
    name = dataset(train=rows, test=rows[:9])
    task = Config("bytes", data=name, max_length=16).load()
    assert (len(task.train), len(task.valid), task.classes) == (30, 9, 3)
    assert bytes((task.train[1].tokens - 1).tolist()) == b"yes 1"
    with pytest.raises(ValueError, match=r"has no column 'image' or 'img'; it has 'text', 'label'"):
        Config("pixels", data=name).load()
    with pytest.raises(ValueError, match=r"has no split 'validation'; it has train, test"):
        Hub(name.removeprefix("hub:")).rows(("validation",), (("text",),))


def test_glue_of_the_hub_has_a_part_for_each_task(dataset, encoder, monkeypatch):
    import datasets

    rows = [{"question": GOOD, "sentence": BAD, "label": k % 2} for k in range(20)]
    name = dataset(train=rows, validation=[*rows[:4], {**rows[0], "label": -1}])
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, part: asked.append(part) or load(name))
    task = Config("glue", data=name, part="QNLI", pretrained=encoder, max_length=16).load()
    assert asked == ["qnli", "qnli"]
    assert (len(task.train), len(task.valid)) == (20, 4)  # a row without a label is none
    words = [None, GOOD, None, BAD, None]
    assert len(task.train[0].tokens) == sum(len((word or "x").split()) for word in words)


def test_a_dataset_that_is_not_there_is_one_line():
    with pytest.raises(ValueError, match=r"data: hub:/no/such/set cannot be loaded: "):
        Hub("/no/such/set").rows(("train",), (("text",),))


@pytest.mark.parametrize("method", ["linformer(rank=4)", "nystrom(landmarks=4, convolution=3)"])
def test_a_method_that_learns_something_of_its_own_is_refused(method, encoder, tmp_path):
    data = files(tmp_path, "SST-2", said_of((0, 1)))
    with pytest.raises(Unsupported, match="for which a pretrained model has no place"):
        tuned(encoder, data, "SST-2", method=method)


def test_a_length_beyond_the_models_positions_is_refused(encoder, tmp_path):
    data = files(tmp_path, "SST-2", said_of((0, 1)))
    with pytest.raises(ValueError, match=r"max_length=4096 is more than the \d+ positions of the pretrained model"):
        Training(Config("glue", pretrained=encoder, max_length=4096, part="SST-2", data=data, batch_size=8))


@pytest.mark.parametrize("killed", [False, True])
def test_a_model_that_cannot_be_written_leaves_the_former_one(killed, tmp_path):
    """Also where a process was killed after it had moved the former one away."""

    class Full:
        def save_pretrained(self, folder):
            folder.mkdir()
            (folder / "half").write_text("")
            raise RuntimeError("I/O error: No space left on device\nmore")

    former = tmp_path / ("model.old" if killed else "model")
    former.mkdir()
    (former / "weights").write_text("former")
    with pytest.raises(OSError, match=r"model cannot be written: I/O error: No space left on device$"):
        export(SimpleNamespace(model=Full()), Config("glue"), tmp_path / "model")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["model", "model/weights"]
