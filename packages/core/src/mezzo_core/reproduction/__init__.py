"""From a paper's printed numbers to what we measured about them, and to a report.

| File | Content |
|---|---|
| `published` | the tables and claims as printed, and what those without evidence would need |
| `claims` | what answers each table and claim: `Answer`, `Evidence`, `Finding` |
| `criteria`, `outcomes` | what a measurement must show for a claim to agree, and what comes out |
| `runner`, `script` | an experiment is a list of jobs that fill a result file; its command line |
| `training`, `tiny` | trainings: of an experiment, of a `reproduce` run |
| `gpus` | work in several processes, one on each GPU |
| `timing`, `speeds`, `*_speed` | the speed of ops and layers, of generation, of training steps |
| `result_file`, `origin` | result files, and the machine, software and commit that they name |
| `measurement`, `beside` | our numbers, of result files or of this run; beside printed ones |
| `reproduce` | `Reproduction`: all that the `reproduce` command is |
| `report`, `tables`, `figures` | report.html and report.json |
| `markdown` | RESULTS.md, and the numbers of READMEs |

`training`, `training_speed` and `gpus` need mezzo-core[train].
"""

from mezzo_core.reproduction.origin import commit as commit
from mezzo_core.reproduction.origin import origin as origin
from mezzo_core.reproduction.result_file import Cell as Cell
from mezzo_core.reproduction.result_file import Entry as Entry
from mezzo_core.reproduction.result_file import Header as Header
from mezzo_core.reproduction.result_file import Result as Result
from mezzo_core.reproduction.result_file import say as say
from mezzo_core.reproduction.script import Options as Options
from mezzo_core.reproduction.script import run_script as run_script
from mezzo_core.reproduction.timing import OOM as OOM
from mezzo_core.reproduction.timing import Timing as Timing
from mezzo_core.reproduction.timing import attempt as attempt
from mezzo_core.reproduction.timing import captured as captured
from mezzo_core.reproduction.timing import measure as measure
from mezzo_core.reproduction.timing import start_afresh as start_afresh
