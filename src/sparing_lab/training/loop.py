"""The loop: batches, steps, evaluations, checkpoints; one process or several, on one machine or many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from sparing.store import refuse_overwriting
from sparing.workbench.estimate import proportion
from sparing.workbench.metrics import End, metrics_of
from sparing_lab.tasks.batches import Batches
from sparing_lab.tasks.trainable import Split, Task
from sparing_lab.training import checkpoint, processes
from sparing_lab.training.config import Config
from sparing_lab.training.objectives import Inputs, inputs_of, losses, model_for
from sparing_lab.training.tuned import Tuned, export
from sparing_lab.training.watch import Stopped, first_bad_gradient, first_bad_output

Record = dict[str, float]  #: of an evaluation
_TRIED = 32  # examples of an evaluation that run at once
_SAVED = 60  # seconds between checkpoints at most, where these are quick to write


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    config: Config
    task: Task
    records: tuple[Record, ...]
    best: Record
    losses: tuple[float, ...]  #: of every step
    model: Any  #: as it is behind the last step; see also `load`
    times: tuple[float, ...]  #: seconds of training up to each record, without evaluations

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.times[-1]

    @property
    def metric(self) -> float:
        """Of the best evaluation."""
        return self.best[self.task.metric]

    @property
    def beats_chance(self) -> bool:
        """Whether what is held out shows that something was learned: chance lies outside of 95 %.

        Of an accuracy that is the best of several, each has its share of the 5 %. Of two questions, both are asked.
        """
        name, chance, count = self.task.metric, self.task.chance(), len(self.task.valid)
        level = 1 - 0.05 / len(self.records)

        def above(accuracy: float, chance: float) -> bool:
            low = proportion(accuracy * count, count, level=level).low
            return low is not None and low > chance

        if name == "perplexity":
            order = self.task.objective != "order" or above(self.best["order_accuracy"], self.task.commonest())
            return self.metric < chance and order
        if name == "accuracy":
            return above(self.metric, chance)
        return self.metric > 2 / math.sqrt(count)  # correlations


class Training:
    """A run that can be stopped after any step and goes on as if it had not been.

    task: its examples, where they were made before: runs that differ in their method can share them.
    """

    def __init__(
        self,
        config: Config,
        folder: str | Path | None = None,
        *,
        tell: Callable[[str, int, int], None] | None = None,
        task: Task | None = None,
    ) -> None:
        processes.need_accelerate()
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            read = {"data": config.data, "pretrained": config.pretrained}
            refuse_overwriting(
                [(name, Path(path)) for name, path in read.items() if path is not None],
                [("folder", self.folder / name) for name in (*checkpoint.FILES, *checkpoint.REPORTS, "config.json")],
                [("folder", self.folder)],
            )
        self.tell = tell or (lambda text, done, steps: None)
        self.task = config.load() if task is None else task
        self.asked = config  #: with epochs, where these were named
        self.config = config = config.settled(self.task)
        if config.batch > len(self.task.train):
            raise ValueError(
                f"batch={config.batch} is more than the {len(self.task.train)} examples of {self.task.name}"
            )
        self.accelerator = processes.accelerator(config.precision)
        if (config.batch // config.accumulate) % self.accelerator.num_processes:
            raise ValueError(
                f"batch={config.batch} in accumulate={config.accumulate} parts does not divide among "
                f"{self.accelerator.num_processes} processes"
            )
        torch.manual_seed(config.seed)
        model = model_for(self.task, config)
        optimizer = torch.optim.AdamW(
            [weight for weight in model.parameters() if weight.requires_grad], lr=config.highest, betas=(0.9, 0.999),
            eps=1e-6, weight_decay=config.decay,
        )  # fmt: skip
        self.model, self.optimizer = processes.prepare(self.accelerator, model, optimizer)
        self.batches = Batches(len(self.task.train), config.batch, seed=config.seed, lengths=self.task.train.lengths)
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.records: list[Record] = []
        self.times: list[float] = []
        self.saved = 0  #: the step of the last checkpoint
        self._due = time.monotonic() + _SAVED
        self.on_record: Callable[[], None] = lambda: None  #: called behind each evaluation, by the main process

    @property
    def bare(self) -> Any:
        """The model without what processes wrap around it."""
        return self.accelerator.unwrap_model(self.model)

    def run(self) -> Trained:
        """The steps that are left."""
        while self.step < self.config.steps:
            self.losses.append(self.take_step())
            self.step += 1
            self.tell(f"loss {self.losses[-1]:.3f}", self.step, self.config.steps)
            if self.step % self.config.every == 0 or self.step == self.config.steps:
                self.records.append({"step": float(self.step), "loss": self.losses[-1], **self.evaluate()})
                self.times.append(self.seconds)
                self._save()
                if self.accelerator.is_main_process:
                    self.on_record()
            elif time.monotonic() > self._due:
                self._save()
        return Trained(
            self.config, self.task, tuple(self.records), self._best(), tuple(self.losses), self.bare,
            tuple(self.times),
        )  # fmt: skip

    def resume(self) -> bool:
        """Go on from the last checkpoint; False: there is none."""
        path = self._path("last")
        if path is None or not path.exists():
            return False
        held = checkpoint.load(path, self.config)
        if held["examples"] != self.task.fingerprint():
            raise ValueError(
                f"checkpoint: {path} has learned from other examples than {self.task.data} has now; name another "
                "folder with --out"
            )
        self.bare.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(held["scaler"])  # of fp16 on a GPU
        self.step = self.saved = held["step"]
        self.seconds = held["seconds"]
        self.losses, self.records, self.times = (list(held[name]) for name in ("losses", "records", "times"))
        return True

    def export(self) -> None:
        """Of a pretrained model, the best state as a folder that transformers loads: FOLDER/model."""
        if self.folder is None or not isinstance(self.bare, Tuned) or not self.accelerator.is_main_process:
            return
        self.bare.load_state_dict(checkpoint.load(self.folder / "best.pt")["model"])
        export(self.bare, self.config, self.folder / "model")

    def take_step(self) -> float:
        """Learn from the next batch: the loss."""
        start = time.perf_counter()
        config, accelerator = self.config, self.accelerator
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(self.step)
        parts = self._parts()
        value = self._gradients(parts)
        if not math.isfinite(value):
            self._stop(parts, value)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        if norm is not None and not bool(torch.as_tensor(norm).isfinite()) and config.precision != "fp16":
            self._stop(parts, value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - start
        return value

    def _seed(self) -> None:
        """Seed by the step, not by how often this run was stopped; all processes draw the same numbers."""
        torch.manual_seed(Random(f"step {self.config.seed} {self.step}").getrandbits(63))

    def _gradients(self, parts: Sequence[Inputs]) -> float:
        """Of the loss over all parts, which is returned."""
        accelerator = self.accelerator
        self._seed()
        counts = torch.tensor([sum(part.asked for part in parts), sum(len(part.targets) for part in parts)])
        asked, examples = accelerator.reduce(counts.to(accelerator.device), reduction="sum").tolist()
        total = torch.zeros((), device=accelerator.device)
        for number, part in enumerate(parts):
            with self._synchronised(last=number == len(parts) - 1):
                found = losses(self.model, part)
                loss = found.loss / asked
                if found.order is not None:
                    loss = loss + found.order / examples
                accelerator.backward(loss * accelerator.num_processes)  # which averages over processes
                total += loss.detach()
        return float(accelerator.reduce(total, reduction="sum"))

    def _parts(self) -> list[Inputs]:
        """What this process runs of the step, in as many parts as the batch is cut into."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = self.batches.part(self.step, rank, ranks)
        size = len(mine) // self.config.accumulate
        return [self._inputs(self.task.train, mine[at : at + size], self.step) for at in range(0, len(mine), size)]

    def _inputs(self, split: Split, numbers: Sequence[int], step: int | str) -> Inputs:
        seeds = [Random(f"hide {self.config.seed} {step} {number}").getrandbits(63) for number in numbers]
        found = inputs_of(self.task, [split[number] for number in numbers], seeds)
        return found.to(self.accelerator.device)

    def _synchronised(self, *, last: bool) -> Any:
        from contextlib import nullcontext

        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def _stop(self, parts: Sequence[Inputs], value: float) -> None:
        lower = f"the loss is {value}; try a rate below {self.config.highest:g}"
        self._seed()
        for part in parts:
            where = first_bad_output(self.bare, lambda part=part: self.bare(**part.arguments))
            if where is not None:
                raise Stopped(f"step {self.step}: the output of {where} is not finite; {lower}")
        self.optimizer.zero_grad()
        self._seed()
        for part in parts:  # again: where one gradient is not finite, clipping has spoilt all
            found = losses(self.bare, part)
            (found.loss if found.order is None else found.loss + found.order).backward()
        where = first_bad_gradient(self.bare) or "some part in another process"
        raise Stopped(f"step {self.step}: the gradient of {where} is not finite; {lower}")

    @torch.no_grad()
    def evaluate(self) -> Record:
        """On the examples that are held out, shared among processes."""
        from accelerate.utils import gather_object

        state = torch.get_rng_state()
        torch.manual_seed(self.config.seed)
        self.model.eval()
        rank, ranks, split = self.accelerator.process_index, self.accelerator.num_processes, self.task.valid
        mine = list(range(rank, len(split), ranks))
        if split.lengths is not None:
            mine.sort(key=split.lengths.__getitem__)  # so that little is padding
        ends: list[End] = []
        device = self.accelerator.device
        sums = torch.zeros(6, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for at in range(0, len(mine), _TRIED):
            part = self._inputs(split, mine[at : at + _TRIED], "valid")
            with self.accelerator.autocast():
                found = losses(self.bare, part)
            order = [0.0 if each is None else float(each) for each in (found.order, found.ordered)]
            each = (float(found.loss), float(found.right), part.asked, *order, len(part.targets))
            sums += torch.tensor(each, dtype=sums.dtype, device=device)
            if self.task.judged:
                ends += _ends(found.scores, part.targets)
        torch.set_rng_state(state)
        loss, right, asked, order_loss, ordered, examples = self.accelerator.reduce(sums, reduction="sum").tolist()
        found_: Record = {"valid_loss": loss / asked}
        if self.task.objective != "score":
            found_["accuracy"] = right / asked
        if self.task.judged:
            score = metrics_of("classifier")[self.task.judged].score
            assert score is not None
            found_[self.task.judged] = score(gather_object(ends), "")
        if self.task.metric == "perplexity":
            found_["perplexity"] = math.exp(min(loss / asked, 50))
        if self.task.objective == "order":
            found_["order_loss"], found_["order_accuracy"] = order_loss / examples, ordered / examples
        return found_

    def _best(self) -> Record:
        key = self.task.metric
        sign = -1 if key == "perplexity" else 1
        return max(self.records, key=lambda record: -math.inf if math.isnan(record[key]) else sign * record[key])

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}.pt"

    def _save(self) -> None:
        start = time.monotonic()
        if self.folder is None or not self.accelerator.is_main_process:
            self._due = math.inf
            return
        held: dict[str, Any] = {
            "config": asdict(self.config), "fingerprint": self.config.fingerprint,
            "examples": self.task.fingerprint(), "model": _cpu(self.bare.state_dict()), "step": self.step,
            "records": self.records, "task": self.task.name,
        }  # fmt: skip
        if self.records and self.records[-1]["step"] == self.step and self._best() is self.records[-1]:
            checkpoint.save(self.folder / "best.pt", held)
        more = {
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "times": self.times,
            "seconds": self.seconds,
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }
        checkpoint.save(self.folder / "last.pt", {**held, **more})
        self.saved = self.step
        took = time.monotonic() - start
        self._due = start + took + max(_SAVED, 20 * took)


def _ends(scores: Tensor, targets: Tensor) -> list[End]:
    """What `measure.metrics` judges."""
    if targets.is_floating_point():
        return [{"score": float(s), "label": float(y)} for s, y in zip(scores.flatten(), targets, strict=True)]
    return [
        {"class": float(found), "label": float(wanted), "classes": float(scores.shape[-1])}
        for found, wanted in zip(scores.argmax(-1), targets, strict=True)
    ]


def _cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def train(config: Config, folder: str | Path | None = None, **options: Any) -> Trained:
    """A whole run; with a folder, from where it was."""
    training = Training(config, folder, **options)
    if training.folder is not None:
        training.folder.mkdir(parents=True, exist_ok=True)
        training.resume()
    found = training.run()
    training.export()
    return found


def load(folder: str | Path) -> Any:
    """The best model of a run, from its folder."""
    held = checkpoint.load(Path(folder) / "best.pt")
    config = Config(**held["config"])
    model = model_for(config.load(), config)
    model.load_state_dict(held["model"])
    return model.eval()
