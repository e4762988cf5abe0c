"""The training loop: steps, evaluations and checkpoints, in one process or several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from sparing.store import refuse_overwriting
from sparing_lab.tasks.batches import Batches
from sparing_lab.tasks.trainable import Task
from sparing_lab.training import checkpoint, processes
from sparing_lab.training.config import Config
from sparing_lab.training.evaluation import evaluate
from sparing_lab.training.objectives import Inputs, losses, make_inputs, model_for
from sparing_lab.training.result import Record, Trained, best_of
from sparing_lab.training.tuned import Tuned, export
from sparing_lab.training.watch import Stopped, first_non_finite

_SECONDS_BETWEEN_CHECKPOINTS = 60  # more if they take long to write


class Training:
    """A run that can be stopped after any step, and resumed with the same results.

    folder: for checkpoints; None writes none.
    tell: called after each step with a text, the number of steps done and the number of all steps.
    task: examples that were loaded before, which runs with different methods can share.
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
        self.asked = config  #: before epochs were resolved to steps
        self.config = config = config.resolve_epochs(self.task)
        if config.batch_size > len(self.task.train):
            raise ValueError(
                f"batch_size={config.batch_size} is more than the {len(self.task.train)} examples of {self.task.name}"
            )
        self.accelerator = processes.accelerator(config.mixed_precision)
        if (config.batch_size // config.gradient_accumulation_steps) % self.accelerator.num_processes:
            raise ValueError(
                f"batch_size={config.batch_size} cannot be divided into gradient_accumulation_steps="
                f"{config.gradient_accumulation_steps} parts for {self.accelerator.num_processes} processes"
            )
        torch.manual_seed(config.seed)
        model = model_for(self.task, config)
        optimizer = torch.optim.AdamW(
            [weight for weight in model.parameters() if weight.requires_grad], lr=config.peak_learning_rate,
            betas=(0.9, 0.999),
            eps=1e-6, weight_decay=config.weight_decay,
        )  # fmt: skip
        self.model, self.optimizer = processes.prepare(self.accelerator, model, optimizer)
        self.batches = Batches(
            len(self.task.train), config.batch_size, seed=config.seed, lengths=self.task.train.lengths
        )
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.records: list[Record] = []
        self.times: list[float] = []
        self.saved = 0  #: the step of the last checkpoint
        self._due = time.monotonic() + _SECONDS_BETWEEN_CHECKPOINTS
        self.on_record: Callable[[], None] = lambda: None  #: called after each evaluation, in the main process

    @property
    def bare(self) -> Any:
        """The model without the wrapper for several processes."""
        return self.accelerator.unwrap_model(self.model)

    def run(self) -> Trained:
        """Take the remaining steps and return the result."""
        while self.step < self.config.max_steps:
            self.losses.append(self.take_step())
            self.step += 1
            self.tell(f"loss {self.losses[-1]:.3f}", self.step, self.config.max_steps)
            if self.step % self.config.steps_between_evaluations == 0 or self.step == self.config.max_steps:
                self.records.append({"step": float(self.step), "loss": self.losses[-1], **self.evaluate()})
                self.times.append(self.seconds)
                self._save()
                if self.accelerator.is_main_process:
                    self.on_record()
            elif time.monotonic() > self._due:
                self._save()
        return Trained(
            self.config, self.task, tuple(self.records), best_of(self.records, self.task.metric), tuple(self.losses),
            self.bare,
            tuple(self.times),
        )  # fmt: skip

    def resume(self) -> bool:
        """Resume from the last checkpoint; return False if there is none."""
        path = self._path("last")
        if path is None or not path.exists():
            return False
        held = checkpoint.load(path, self.config)
        if held["examples"] != self.task.fingerprint():
            raise ValueError(
                f"checkpoint: {path} was trained on other examples than {self.task.data} holds now; name another "
                "folder with --out"
            )
        self.bare.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(held["scaler"])  # fp16 on a GPU
        self.step = self.saved = held["step"]
        self.seconds = held["seconds"]
        self.losses, self.records, self.times = (list(held[name]) for name in ("losses", "records", "times"))
        return True

    def export(self) -> None:
        """Write the best weights of a fine-tuned model to FOLDER/model, as transformers loads them."""
        if self.folder is None or not isinstance(self.bare, Tuned) or not self.accelerator.is_main_process:
            return
        self.bare.load_state_dict(checkpoint.load(self.folder / "best.pt")["model"])
        export(self.bare, self.config, self.folder / "model")

    def evaluate(self) -> Record:
        """Return loss and metrics on the held-out examples."""
        return evaluate(self.bare, self.task, self.accelerator, self.config.seed)

    def take_step(self) -> float:
        """Train on the next batch and return its loss."""
        start = time.perf_counter()
        config, accelerator = self.config, self.accelerator
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(self.step)
        parts = self._parts()
        value = self._gradients(parts)
        if not math.isfinite(value):
            self._stop(parts, value)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        if norm is not None and not bool(torch.as_tensor(norm).isfinite()) and config.mixed_precision != "fp16":
            self._stop(parts, value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - start
        return value

    def _seed(self) -> None:
        """Seed by the step alone: stopped runs draw the same numbers, and so do all processes."""
        torch.manual_seed(Random(f"step {self.config.seed} {self.step}").getrandbits(63))

    def _gradients(self, parts: Sequence[Inputs]) -> float:
        """Accumulate the gradients of all parts, and return the loss over all processes."""
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
                accelerator.backward(loss * accelerator.num_processes)  # backward averages over processes
                total += loss.detach()
        return float(accelerator.reduce(total, reduction="sum"))

    def _parts(self) -> list[Inputs]:
        """Return this process's share of the batch, in gradient_accumulation_steps parts."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = self.batches.part(self.step, rank, ranks)
        size = len(mine) // self.config.gradient_accumulation_steps
        return [
            make_inputs(self.task, self.task.train, mine[at : at + size], f"{self.config.seed} {self.step}").to(
                self.accelerator.device
            )
            for at in range(0, len(mine), size)
        ]

    def _synchronised(self, *, last: bool) -> Any:
        """Return a context that exchanges gradients after the last part only."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def _stop(self, parts: Sequence[Inputs], loss: float) -> None:
        """Raise `Stopped` with the first module or parameter that is not finite in this step."""
        where = first_non_finite(self.bare, parts, self._seed)
        raise Stopped(
            f"step {self.step}: {where} is not finite; the loss is {loss}; try a learning rate below "
            f"{self.config.peak_learning_rate:g}"
        )

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}.pt"

    def _save(self) -> None:
        start = time.monotonic()
        if self.folder is None or not self.accelerator.is_main_process:
            self._due = math.inf
            return
        held: dict[str, Any] = {
            "config": asdict(self.config), "examples": self.task.fingerprint(),
            "model": _cpu(self.bare.state_dict()), "step": self.step, "records": self.records, "task": self.task.name,
        }  # fmt: skip
        if (
            self.records
            and self.records[-1]["step"] == self.step
            and best_of(self.records, self.task.metric) is self.records[-1]
        ):
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
        self._due = start + took + max(_SECONDS_BETWEEN_CHECKPOINTS, 20 * took)


def _cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def train(config: Config, folder: str | Path | None = None, **options: Any) -> Trained:
    """Train and return the result; with a folder, resume from its last checkpoint."""
    training = Training(config, folder, **options)
    if training.folder is not None:
        training.folder.mkdir(parents=True, exist_ok=True)
        training.resume()
    found = training.run()
    training.export()
    return found


def load(folder: str | Path) -> Any:
    """Return the model of a run's best evaluation, from its folder."""
    held = checkpoint.load(Path(folder) / "best.pt")
    config = Config(**held["config"])
    model = model_for(config.load(), config)
    model.load_state_dict(held["model"])
    return model.eval()
