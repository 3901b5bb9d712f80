"""Measuring, once for all papers: an experiment is a list of jobs that fill a result file.

`training`, `training_step` and `gpus` need mezzo-core[train].
"""

from mezzo_core.bench.origin import commit as commit
from mezzo_core.bench.origin import origin as origin
from mezzo_core.bench.result import Cell as Cell
from mezzo_core.bench.result import Entry as Entry
from mezzo_core.bench.result import Header as Header
from mezzo_core.bench.result import Result as Result
from mezzo_core.bench.script import Options as Options
from mezzo_core.bench.script import run_script as run_script
from mezzo_core.bench.script import say as say
from mezzo_core.bench.timing import OOM as OOM
from mezzo_core.bench.timing import Timing as Timing
from mezzo_core.bench.timing import attempt as attempt
from mezzo_core.bench.timing import captured as captured
from mezzo_core.bench.timing import measure as measure
from mezzo_core.bench.timing import start_afresh as start_afresh
