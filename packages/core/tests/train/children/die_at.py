"""Kill training at chosen moments: CONFIG OUT EVERY; one process is forked for each.

An event is something that changes the folder OUT/N (a file opened for writing, a rename, a removal,
a new folder). A first run, in OUT/0, is left alone and counted. For every EVERY-th event N, from
the second on, a run dies just before its N-th event, and is then started again. Prints how each run
ended, as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

# What a run imports late is imported here once, not in every fork.
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torch._dynamo  # noqa: F401
from mezzo_core.config_json import from_json
from mezzo_core.train.loop import train

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

config = from_json(json.loads(Path(sys.argv[1]).read_text()))


def run(out, die_at):
    """Train in a forked process; return its wait status and how many events it saw."""
    pipe_out, pipe_in = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event, arguments):
            nonlocal seen
            opens = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
            if (opens or event in CHANGES) and out in str(arguments[0]):
                seen += 1
                if seen == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        train(config, Path(out), quiet=True)
        os.write(pipe_in, str(seen).encode())
        os._exit(0)
    os.close(pipe_in)
    seen = os.read(pipe_out, 100)
    return os.waitpid(child, 0)[1], int(seen or 0)


out, every = Path(sys.argv[2]), int(sys.argv[3])
_, events = run(str(out / "0"), 0)
ended = {0: {"events": events}}
for event in range(2, events + 1, every):
    status, _ = run(str(out / str(event)), event)
    again, _ = run(str(out / str(event)), 0)
    ended[event] = {"signal": os.WTERMSIG(status), "again": again}
sys.stdout.write(json.dumps(ended))
