"""GLUE's files with their quirks, and sentence pairs as one input of a classifier."""

import gzip
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from sparing.documents import Documents
from sparing.models import Subject
from sparing.workbench.comparison.compare import compare
from sparing.workbench.comparison.quality import quality
from sparing.workbench.prepare import prepare
from sparing_lab.tasks.glue import TASKS, classes_of, given, read, task_of
from tests.support.model_zoo import SMALL, TOKENS

FILES = {
    "CoLA": ('gj04\t1\t\tThe "sailors" rode.\ngj04\t0\t*\tSailors the rode.\n', ("0",)),
    "SST-2": ("sentence\tlabel\nfine . \t1\nbad . \t0\n", ("0",)),
    "MRPC": ('\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"one\ttwo\r\n0\t9\t8\tthree\tfour\r\n', ("0",)),
    "STS-B": ("index\tsource1\tsentence1\tsentence2\tscore\n0\tnone\tA man.\tA men.\t5.000\n1\tx\ta\tb\t0.25\n", 0.25),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow?\t1\n4\t5\t6\ta\tb\t0\n", ("0",)),
    "MNLI": ("index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tc\td\tcontradiction\n", ("contradiction",)),
    "MNLI-mm": ("index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tc\td\tentailment\n", ("entailment",)),
    "QNLI": ("index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tentailment\n1\tb\tc\tnot_entailment\n", ("not_entailment",)),
    "RTE": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\tb\tc\tnot_entailment\n", ("not_entailment",)),
    "WNLI": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\tb\tc\t0\n", ("0",)),
}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    for name, (text, _) in FILES.items():
        path = TASKS[name].path(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_read_with_its_quirks(data, name):
    task, last = TASKS[name], FILES[name][1]
    found = read(task, data)
    assert len(found) == len(found.labels) == 2
    assert (found.pairs is None) == (task.pair is None) == (name in ("CoLA", "SST-2"))
    assert found.labels[1] == (last if isinstance(last, float) else last[0])
    assert len(read(task, data, most=1)) == 1


def test_texts_are_the_cells_as_they_stand(data):
    assert read(TASKS["CoLA"], data).texts == ('The "sailors" rode.', "Sailors the rode.")
    mrpc = read(TASKS["MRPC"], data)
    assert mrpc.texts + mrpc.pairs == ('"one', "three", "two", "four")
    stsb = read(TASKS["STS-B"], data)
    assert (stsb.texts[0], stsb.pairs[0], stsb.labels[0]) == ("A man.", "A men.", 5.0)


def test_the_folder_may_be_glue_itself(data):
    assert [task.name for task in given(data)] == [task.name for task in given(data / "glue")] == list(TASKS)
    assert read(TASKS["RTE"], data / "glue").fingerprint == read(TASKS["RTE"], data).fingerprint


def test_a_missing_file_is_named_with_its_format_and_source(tmp_path):
    with pytest.raises(ValueError, match=r"glue.STS-B.dev\.tsv .*'sentence1', 'sentence2', 'score'.*gluebenchmark"):
        read(TASKS["STS-B"], tmp_path)
    with pytest.raises(ValueError, match="no header, columns source, label, mark, sentence"):
        read(TASKS["CoLA"], None)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("SST-2", "text\tlabel\nfine\t1\n", r"dev\.tsv has no column 'sentence'; it has 'text', 'label'"),
        ("SST-2", "sentence\tlabel\nfine\t1\nba", r"dev\.tsv, line 3 has 1 cells, not 2"),
        ("SST-2", "sentence\tlabel\nfine\tgood\n", r"line 2: 'label' is 'good'; it must be one of '0', '1'"),
        ("SST-2", "sentence\tlabel\n \t1\n", r"line 2: 'sentence' is empty"),
        ("SST-2", "sentence\tlabel\n", "a header and no rows"),
        ("SST-2", "", "is empty"),
        ("STS-B", "sentence1\tsentence2\tscore\na\tb\tnan\n", "line 2: 'score' is 'nan', which is not a finite number"),
        ("CoLA", "gj04\t1\tThe sailors.\n", "line 1 has 3 cells, not 4"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, text, says):
    path = TASKS[name].path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read(TASKS[name], tmp_path)


def test_classes_come_in_the_order_of_the_model():
    named = SimpleNamespace(label2id={"CONTRADICTION": 0, "ENTAILMENT": 1, "NEUTRAL": 2})
    assert classes_of(TASKS["MNLI"], named) == {"entailment": 1.0, "neutral": 2.0, "contradiction": 0.0}
    bare = SimpleNamespace(label2id={"LABEL_0": 0, "LABEL_1": 1})
    assert classes_of(TASKS["RTE"], bare) == {"entailment": 0.0, "not_entailment": 1.0}


def test_a_classifier_says_which_task_it_is_for():
    two, three = SimpleNamespace(num_labels=2), SimpleNamespace(num_labels=3)
    every = list(TASKS.values())
    assert task_of("bert-base-uncased-SST-2", two, every).name == "SST-2"
    assert task_of("finetuned-sst2", two, every).name == "SST-2"
    assert task_of("mine", SimpleNamespace(num_labels=2, finetuning_task="glue:qnli"), every).name == "QNLI"
    assert task_of("mine", three, [TASKS["RTE"], TASKS["MNLI"]]).name == "MNLI"
    with pytest.raises(ValueError, match="2 classes and does not say which task"):
        task_of("mine", two, every)


class Pairs:
    """A tokenizer of sorts: 1 text 2 pair 2."""

    def __call__(self, text, pair, truncation, max_length=1000, verbose=True):
        assert truncation in (False, "longest_first")
        first, second = ([3 + b % 90 for b in part.encode()] for part in (text, pair))
        while len(first) + len(second) > max_length - 3:
            (first if len(first) > len(second) else second).pop()
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return {"input_ids": [1, *first, 2, *second, 2], "token_type_ids": types}


def test_a_pair_is_one_input_with_token_types():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TOKENS, **SMALL, num_labels=2)).eval()
    subject = Subject("pairs", model, Pairs())
    rows, types, longer = subject.encode_pairs(["abcdef", "ab"], ["xy", "vwx"], 9)
    assert longer == 1
    assert [len(row) for row in rows] == [9, 8]
    assert types[0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    with torch.no_grad():
        alone = subject.run(rows[0], types[0]).logits
        assert not torch.allclose(alone, subject.run(rows[0]).logits), "token types are read"
        both = subject.run_batch([rows[0], rows[1][:6]], [types[0], types[1][:6]]).logits
        assert torch.allclose(both[:1], alone, atol=1e-5)
        assert torch.allclose(both[1:], subject.run(rows[1][:6], types[1][:6]).logits, atol=1e-5)


def test_a_comparison_reads_both_texts_of_a_classifiers_pair():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**TOKENS, **SMALL, num_labels=2)).eval()
    subject = Subject("pairs", model, Pairs())
    given = Documents("pairs", ("abcdef", "ab", "cde"), (0, 1, 0), pairs=("xy", "vwx", "z"))
    found = prepare(subject, given, documents=3)
    assert [len(ids) for ids in found.rows] == [len(kinds) for kinds in found.types] == [11, 8, 7]
    assert found.pairs is None
    with torch.no_grad():
        logits = subject.run(found.rows[0], found.types[0]).logits[0]
    ends = quality(subject, found.rows, "window(size=100)", types=found.types).ends
    assert ends[0]["exact_class"] == float(logits.argmax())
    plain = quality(subject, found.rows, "window(size=2)").ends
    typed = quality(subject, found.rows, "window(size=2)", types=found.types).ends
    assert plain[0]["change"] != typed[0]["change"]
    other = replace(found, types=tuple(1 - kinds for kinds in found.types))
    assert found.fingerprint != other.fingerprint, "kept results are of these token types"
    quick = {"methods": ["window(size=2)"], "rounds": 1, "jobs": 1, "lengths": False, "batch_size": 1}
    assert "accuracy" in compare(subject, given, metric="accuracy", **quick).rows[0].end


def test_files_may_be_compressed(tmp_path):
    path = tmp_path / "glue" / "SST-2" / "dev.tsv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(FILES["SST-2"][0].encode()))
    assert given(tmp_path) == [TASKS["SST-2"]]
    assert len(read(TASKS["SST-2"], tmp_path)) == 2
