"""Models and data come from elsewhere: nothing in them is run."""

import json
import pickle

import numpy
import pytest
import torch
from transformers import BertConfig, BertModel

from sparing import models as subject
from sparing_lab.tasks import arena_files, masked

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")
from transformers import BertConfig as Custom
"""


@pytest.fixture
def folder(tmp_path):
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 5,
    }
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    return tmp_path


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_in_arrays_are_not_run(tmp_path):
    (tmp_path / "cifar10").mkdir()
    held = numpy.array([Runs(tmp_path / "ran")], dtype=object)
    numpy.savez(tmp_path / "cifar10" / "x.npz", x_train=held)
    with pytest.raises(ValueError, match=r"x\.npz cannot be read as \.npz: .*allow_pickle"):
        arena_files.arrays(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", [subject.load, masked.load])
def test_code_of_a_model_is_not_run(folder, load):
    config = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer")
    config |= {"model_type": "custom", "auto_map": dict.fromkeys(names, "custom.Custom")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "custom.py").write_text(CODE)
    with pytest.raises(ValueError, match=r"cannot be loaded.*custom code"):
        load(str(folder))
    assert not (folder / "ran").exists()


def test_weights_that_are_a_pickle_are_not_run(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Runs(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded"):
        subject.load(str(folder))
    assert not (folder / "ran").exists()
    pickle.loads(pickle.dumps(Runs(folder / "ran"))).close()
    assert (folder / "ran").exists(), "control: a plain pickle would have run it"
