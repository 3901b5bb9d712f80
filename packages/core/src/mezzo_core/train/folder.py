"""The folder of a run: whose it is, and whether a run may go on in it."""

import json
import shutil
from pathlib import Path
from typing import Any

from mezzo_core.config_json import to_json
from mezzo_core.errors import UserError
from mezzo_core.train.config import TrainConfig

# What may change when a run goes on: how long, how it is watched and how it is computed, never
# what is learned from what.
CHANGEABLE = frozenset(
    {
        "steps",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep_checkpoints",
        "micro_batch_size",
        "compile",
        "track",
    }
)


def claim_folder(out: Path, config: TrainConfig, resume: bool) -> None:
    """Make `out` the folder of this run and write its config.json.

    Args:
        out: made if needed, with its parents.
        config: of the run that wants to use it.
        resume: go on with the run that is there, which must be of the same configuration
            (`CHANGEABLE` fields aside). False removes that run's checkpoints, log and model.

    Raises:
        UserError: if another run is there, or the folder cannot be written.
    """
    wanted = to_json(config)
    path = out / "config.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resume:
                _refuse_another(out, json.loads(path.read_text(encoding="utf-8")), wanted)
            else:
                _remove_run(out)
        scratch = out / "config.json.tmp"
        scratch.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        scratch.replace(path)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"cannot keep a run in {out}: {error}") from error


def _refuse_another(out: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    same = {name: wanted.get(name) for name in CHANGEABLE}
    differences = _differences({**found, **same}, {**wanted, **same})
    if differences:
        shown = "; ".join(differences[:3])
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{out} holds a run of another configuration ({shown}{more}): "
            "train into another folder, or without resuming, which removes that run"
        )


def _differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """List what differs between two JSON values, each as one phrase."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*found, *wanted])
        pairs = [(f"{name}.{key}".lstrip("."), found.get(key), wanted.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(found, wanted, strict=True))]
    elif found == wanted:
        return []
    elif isinstance(found, list) and isinstance(wanted, list):
        return [f"{name} has {len(found)} items there, {len(wanted)} here"]
    else:
        return [f"{name} is {found!r} there, {wanted!r} here"]
    return [phrase for key, old, new in pairs for phrase in _differences(old, new, key)]


def _remove_run(out: Path) -> None:
    for folder in ("checkpoints", "model", "tensorboard"):
        shutil.rmtree(out / folder, ignore_errors=True)
    for file in ("log.jsonl", "loss.png"):
        (out / file).unlink(missing_ok=True)
