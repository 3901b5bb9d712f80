"""Train by a configuration's JSON: CONFIG OUT [STOP_AFTER [RANK]]; stops as a killed process.

OUT may be several folders, joined as those of PATH: then it trains as often.
"""

import json
import os
import signal
import sys
from pathlib import Path

from mezzo_core.config_json import from_json
from mezzo_core.errors import UserError
from mezzo_core.train.loop import train

config = from_json(json.loads(Path(sys.argv[1]).read_text()), allow_packages=("toys",))
stop_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
stopping_rank = sys.argv[4] if len(sys.argv) > 4 else os.environ["RANK"]


def die(row):
    if row["step"] == stop_after and os.environ["RANK"] == stopping_rank:
        os.kill(os.getpid(), signal.SIGKILL)


try:
    for out in sys.argv[2].split(os.pathsep):
        train(config, Path(out), on_step=die, quiet=True)
except UserError as error:
    sys.stderr.write(f"UserError: {error}\n")
    sys.exit(2)
