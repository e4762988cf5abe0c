"""Training: it learns, it resumes, and it names the module that is not finite."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from sparing import Unsupported
from sparing.store import add_checksum
from sparing_lab.training import checkpoint
from sparing_lab.training.config import RENAMED, Config, made, read
from sparing_lab.training.loop import Training, load, train
from sparing_lab.training.watch import Stopped

SMALL = {
    "max_length": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_layers": 1,
    "batch_size": 4,
    "max_steps": 6,
    "eval_steps": 2,
}


def config(task="causal", **options):
    return Config(task, **{**SMALL, **options})


@pytest.mark.parametrize("method", ["exact", "yoso(hashes=4)", "kernel(kind=elu)", "window(size=8)"])
def test_a_language_model_learns_with_any_method(method):
    found = train(config(method=method, max_steps=30, learning_rate=0.01, eval_steps=30))
    assert found.losses[-1] < found.losses[0] - 0.5
    assert found.metric < 0.7 * found.task.vocabulary


@pytest.mark.parametrize("task", ["masked", "order", "bytes"])
def test_other_objectives_learn(task):
    found = train(config(task, max_length=128, max_steps=30, learning_rate=0.01, eval_steps=30))
    assert sum(found.losses[-5:]) < sum(found.losses[:5])


def test_what_is_learned_is_told_from_chance():
    """Both questions of `order` count, and the best of many evaluations has to be better than that of one."""
    found = train(config("order"))
    for share, learned in ((0.5, False), (0.9, True)):
        best = {**found.best, "perplexity": 2.0, "order_accuracy": share}
        assert replace(found, best=best).beats_chance is learned
    assert not replace(found, best={**best, "perplexity": 99.0}).beats_chance
    found = train(config("listops"))
    best = {**found.best, "accuracy": found.task.chance() + 0.05}  # 2.5 standard errors of 400 examples
    assert replace(found, best=best, records=found.records[:1]).beats_chance
    assert not replace(found, best=best, records=found.records[:1] * 50).beats_chance


def test_a_run_of_an_earlier_version_is_resumed_from_its_files(tmp_path):
    """Its settings and its checkpoint have the former names."""
    asked = config("masked")
    whole = train(asked, tmp_path)
    former = {new: old for old, new in RENAMED.items()}
    old = {former.get(name, name): value for name, value in asdict(asked).items()}
    assert {"length", "hidden", "rate", "evaluate"} <= old.keys()
    (tmp_path / "config.json").write_text(json.dumps(add_checksum(old)))
    assert made(read(tmp_path / "config.json")) == asked
    held = checkpoint.load(tmp_path / "last.pt")
    checkpoint.save(tmp_path / "last.pt", {**held, "config": old})
    training = Training(asked, tmp_path)
    assert training.resume()
    assert training.step == 6
    assert training.run().losses == whole.losses
    with pytest.raises(ValueError, match=r"belongs to another run \(learning_rate=0.0, now 0.5\)"):
        Training(replace(asked, learning_rate=0.5), tmp_path).resume()
    (tmp_path / "config.json").write_text(json.dumps({"task": "causal", "hidden": 3, "intermediate_size": 4}))
    with pytest.raises(ValueError, match=r"config.json: 'hidden' is the former name of 'intermediate_size'; keep one"):
        read(tmp_path / "config.json")


class Killed(Exception):
    pass


@pytest.mark.parametrize(("method", "dropout"), [("exact", 0.0), ("yoso(hashes=4)", 0.2)])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(method, dropout, tmp_path):
    asked = config("masked", method=method, dropout=dropout)
    whole = train(asked)

    def kill(text, done, steps):
        if done == 5:  # one step after a checkpoint: that step is done again
            raise Killed

    with pytest.raises(Killed):
        train(asked, tmp_path, tell=kill)
    torch.rand(7)  # the global generator stands elsewhere in another process
    again = train(asked, tmp_path)
    assert again.losses == whole.losses
    assert again.records == whole.records


def test_the_steps_of_a_run_depend_on_its_seed():
    assert train(config(seed=1)).losses == train(config(seed=1)).losses
    assert train(config(seed=1)).losses != train(config(seed=2)).losses


def test_runs_share_examples_that_were_made_before():
    asked = config(seed=1)
    task = asked.load()
    training = Training(asked, task=task)
    assert training.task is task
    assert list(training.run().losses) == list(train(asked).losses)


def test_parts_of_a_batch_add_up_to_it():
    whole, parts = (train(config("masked", gradient_accumulation_steps=n)).losses for n in (1, 2))
    assert parts == pytest.approx(whole, rel=1e-4)
    assert train(config("masked", batch_size=2)).losses != pytest.approx(whole, rel=1e-4)


def test_evaluations_do_not_change_what_is_learned():
    often, rarely = (train(config(method="yoso(hashes=4)", eval_steps=n)).losses for n in (1, 6))
    assert often == rarely


def test_the_learning_rate_rises_and_falls():
    run = config(max_steps=100, warmup_ratio=0.1, learning_rate=1.0)
    rates = [run.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.02


def test_a_loss_that_is_not_finite_is_traced_to_its_layer():
    training = Training(config(num_layers=2))
    with torch.no_grad():
        training.bare.decoder.layers[1].feed_forward[0].weight[0, 0] = float("nan")
    with pytest.raises(Stopped, match=r"step 0: the output of decoder\.layers\.1\.feed_forward\.0 is not finite"):
        training.run()


def test_a_gradient_that_is_not_finite_is_traced_to_its_parameter():
    training = Training(config())
    training.bare.decoder.norm.weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(
        Stopped, match=r"step 0: the gradient of decoder\.norm\.weight is not finite.*learning rate below"
    ):
        training.run()


def test_the_best_checkpoint_is_kept(tmp_path):
    found = train(config(max_steps=8, learning_rate=0.01), tmp_path)
    best = checkpoint.load(tmp_path / "best.pt")
    assert best["records"][-1] == found.best
    assert checkpoint.load(tmp_path / "last.pt")["step"] == 8


def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    train(config(max_steps=2), tmp_path)

    def full(source, target):
        raise OSError(28, "no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path / "last.pt", {"step": 3})
    assert checkpoint.load(tmp_path / "last.pt", config(max_steps=2))["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "last.pt"]


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path):
    path = tmp_path / "last.pt"
    path.write_bytes(b"half of")
    with pytest.raises(ValueError, match=r"last.pt is damaged"):
        train(config(), tmp_path)
    torch.save({"model": 1}, path)
    with pytest.raises(ValueError, match="was not written by sparing train"):
        train(config(), tmp_path)
    train(config(max_steps=2), tmp_path := tmp_path / "other")
    with pytest.raises(ValueError, match=r"belongs to another run \(max_steps=2, now 6\)"):
        train(config(eval_steps=3), tmp_path)
    path = tmp_path / "last.pt"
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 64]) + whole[middle + 64 :])
    with pytest.raises(ValueError, match=r"last.pt is damaged.*delete it to start again"):
        train(config(max_steps=2), tmp_path)
    path.write_bytes((tmp_path / "best.pt").read_bytes())
    with pytest.raises(ValueError, match="has no losses, optimizer, scaler, seconds, times"):
        train(config(max_steps=2), tmp_path)


def test_a_checkpoint_of_other_examples_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("what was there first, line by line\n" * 1000)
    asked = config(data=str(text))
    train(asked, tmp_path / "run")
    text.write_text("what stands there now, line by line\n" * 1000)
    with pytest.raises(ValueError, match=r"was trained on other examples than text.txt holds now"):
        train(asked, tmp_path / "run")


def test_checkpoints_are_written_between_evaluations_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "_due", property(lambda self: -math.inf, lambda self, when: None), raising=False)
    asked = config(eval_steps=6)

    def kill(text, done, steps):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        train(asked, tmp_path, tell=kill)
    assert checkpoint.load(tmp_path / "last.pt", asked)["step"] == 2
    assert not (tmp_path / "best.pt").exists()
    assert train(asked, tmp_path).losses == train(asked).losses


def test_the_best_model_is_loaded_from_its_folder(tmp_path):
    found = train(config(), str(tmp_path))
    assert found.best is found.records[-1]
    tokens = found.task.valid[0].tokens[None]
    assert torch.equal(load(tmp_path)(tokens), found.model.eval()(tokens))


def test_runs_of_one_process_may_differ_in_precision():
    assert train(config()).losses != train(config(mixed_precision="bf16")).losses
    assert train(config()).losses == train(config()).losses


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no task is named"),
        ({"task": "chess"}, "task='chess' is not one of listops"),
        ({"task": "causal", "method": "magic"}, "unknown name 'magic'"),
        ({"task": "causal", "depth": 3}, "unknown setting 'depth'"),
        ({"task": "causal", "hidden": 3}, "'hidden' is now 'intermediate_size'"),
        ({"task": "causal", "max_steps": "many"}, "max_steps='many' must be of type int"),
        ({"task": "causal", "max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"task": "causal", "learning_rate": -1.0}, "learning_rate=-1.0 must be finite and not negative"),
        ({"task": "causal", "learning_rate": math.nan}, "learning_rate=nan must be finite"),
        ({"task": "causal", "epochs": math.inf}, "epochs=inf must be finite"),
        ({"task": "causal", "dropout": 1.0}, "dropout=1.0 is a probability"),
        ({"task": "causal", "num_heads": 3}, "hidden_size=64 must be a multiple of num_heads=3"),
        ({"task": "causal", "seed": 2**70}, "must be from 0 to below"),
        ({"task": "causal", "max_steps": 10**400}, r"max_steps=10+ must be below 2\^63"),
        ({"task": "causal", "max_grad_norm": 0}, "max_grad_norm=0 must be above 0"),
        ({"task": "causal", "pretrained": "minilm"}, "pretrained='minilm' belongs to glue"),
        ({"task": "glue", "hidden_size": 32}, "hidden_size=32 cannot be chosen for a pretrained model"),
        ({"task": "causal", "warmup_ratio": 1.5}, "warmup_ratio=1.5 is a share"),
        ({"task": "causal", "batch_size": 3, "gradient_accumulation_steps": 2}, "batch_size=3 must be a multiple"),
        ({"task": "causal", "mixed_precision": "int4"}, "mixed_precision='int4' is not one of"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        made(settings)


def test_settings_come_from_a_file(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"task": "causal", "max_steps": 3}))
    assert made(read(tmp_path / "run.json")) == Config("causal", max_steps=3)
    (tmp_path / "bad.json").write_text("{")
    for name, said in (("bad.json", "is not JSON"), ("none.json", "there is no file")):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / name)


def test_a_method_that_cannot_do_the_task_is_refused_before_the_first_step():
    with pytest.raises(Unsupported, match="cannot be causal"):
        Training(config(method="skyformer"))
    with pytest.raises(ValueError, match="batch_size=100000 is more than"):
        Training(config(batch_size=100000))
    with pytest.raises(ValueError, match="listops generates its examples"):
        Training(config("listops", data=__file__))
