"""A training run as a file: whole or not there."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from sparing.store import Damaged, seal, unseal, write_files
from sparing_lab.training.config import Config, differences

FORMAT = 1
#: What training writes into a run's folder; `model` is that of a pretrained one, as transformers loads it.
FILES = ("best.pt", "last.pt", "model", "model.new", "model.old")
REPORTS = ("result.json", "log.csv", "curve.png")  #: that the command writes beside them
_ALWAYS = {"config", "fingerprint", "examples", "model", "step", "records", "task"}
_TO_GO_ON = {"optimizer", "losses", "times", "seconds", "scaler"}
_OUT = "delete it to start anew, or name another folder with --out"


def save(path: Path, held: dict[str, Any]) -> None:
    """Write a checkpoint with a checksum; the last good one stays until this one is complete."""
    written = io.BytesIO()
    torch.save({"sparing": FORMAT, **held}, written)
    write_files({path: seal(written.getvalue())})


def load(path: Path, config: Config | None = None) -> dict[str, Any]:
    """Return what `save` wrote; config: the run that it must belong to."""
    try:
        held = _unpacked(unseal(path.read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"checkpoint: there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"checkpoint: {path} cannot be read: {error.strerror}; {_OUT}") from None
    except Damaged:
        raise ValueError(f"checkpoint: {path} is damaged, or no checkpoint; {_OUT}") from None
    if not isinstance(held, dict) or "sparing" not in held:
        raise ValueError(f"checkpoint: {path} was not written by sparing train; {_OUT}")
    if held["sparing"] != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {held['sparing']}; this version reads {FORMAT}; {_OUT}")
    if missing := (_ALWAYS if config is None else _ALWAYS | _TO_GO_ON) - held.keys():
        raise ValueError(f"checkpoint: {path} has no {', '.join(sorted(missing))}; {_OUT}")
    if config is not None and held["fingerprint"] != config.fingerprint:
        differ = differences(held["config"], config.steps_taken())
        raise ValueError(f"checkpoint: {path} is of another run ({differ}); name another folder with --out")
    found: dict[str, Any] = held
    return found


def _unpacked(content: bytes) -> Any:
    """Return what torch packed, or raise `Damaged`.

    Files of earlier versions have no checksum of the whole, but each part has: torch does not look at it.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if archive.testzip() is not None:
                raise Damaged
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # whatever is wrong with the bytes
        raise Damaged from None
