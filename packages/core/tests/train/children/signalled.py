"""Train by a configuration's JSON: CONFIG OUT [RANK:STEP:SIGNAL]...; each process sends itself its.

It ends as a command does, and is out of patience soon.
"""

import json
import os
import signal
import sys
from pathlib import Path

from mezzo_core.config_json import from_json
from mezzo_core.errors import UserError
from mezzo_core.train import stopping
from mezzo_core.train.loop import train

stopping._PATIENCE_SECONDS = 0.5
config = from_json(json.loads(Path(sys.argv[1]).read_text()))
chosen = {}
for text in sys.argv[3:]:
    rank, step, name = text.split(":")
    if rank == os.environ["RANK"]:
        chosen[int(step)] = signal.Signals[name]


def send(row):
    if row["step"] in chosen:
        os.kill(os.getpid(), chosen[row["step"]])


try:
    train(config, Path(sys.argv[2]), on_step=send, quiet=True)
except stopping.StoppedError as error:
    sys.stderr.write(f"StoppedError: {error}\n")
    sys.exit(error.exit_code)
except UserError as error:
    sys.stderr.write(f"UserError: {error}\n")
    sys.exit(2)
