"""Checkpoints of a training run, written atomically."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from sparing.store import Damaged, seal, unseal, write_files
from sparing_lab.training.config import Config, differences, renamed

FORMAT = 1
#: What training writes into a run's folder; `model` is a fine-tuned model, as transformers loads it.
FILES = ("best.pt", "last.pt", "model", "model.new", "model.old")
REPORTS = ("result.json", "log.csv", "curve.png")  #: what the command writes beside them
_ALWAYS = {"config", "examples", "model", "step", "records", "task"}
_TO_RESUME = {"optimizer", "losses", "times", "seconds", "scaler"}
_OUT = "delete it to start again, or name another folder with --out"


def save(path: Path, held: dict[str, Any]) -> None:
    """Write a checkpoint with a checksum; the last good one stays until this one is complete."""
    written = io.BytesIO()
    torch.save({"sparing": FORMAT, **held}, written)
    write_files({path: seal(written.getvalue())})


def load(path: Path, config: Config | None = None) -> dict[str, Any]:
    """Return what `save` wrote, and refuse a checkpoint of a run with other settings than `config`."""
    try:
        held = _unpacked(unseal(path.read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"checkpoint: there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"checkpoint: {path} cannot be read: {error.strerror}; {_OUT}") from None
    except Damaged:
        raise ValueError(f"checkpoint: {path} is damaged or not a checkpoint; {_OUT}") from None
    if not isinstance(held, dict) or "sparing" not in held:
        raise ValueError(f"checkpoint: {path} was not written by sparing train; {_OUT}")
    if held["sparing"] != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {held['sparing']}; this version reads {FORMAT}; {_OUT}")
    if missing := (_ALWAYS if config is None else _ALWAYS | _TO_RESUME) - held.keys():
        raise ValueError(f"checkpoint: {path} has no {', '.join(sorted(missing))}; {_OUT}")
    held["config"] = renamed(held["config"], f"checkpoint: {path}")
    if config is not None and (differ := differences(held["config"], config.steps_taken())):
        raise ValueError(f"checkpoint: {path} belongs to another run ({differ}); name another folder with --out")
    found: dict[str, Any] = held
    return found


def _unpacked(content: bytes) -> Any:
    """Return what torch packed, or raise `Damaged`.

    Files of earlier versions have no checksum of the whole. Each part has one, which torch does not check.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if archive.testzip() is not None:
                raise Damaged
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds of errors for damaged bytes
        raise Damaged from None
