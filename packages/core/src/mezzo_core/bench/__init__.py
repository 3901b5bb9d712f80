"""Measuring, once for all papers. `.training` and `.training_step` need mezzo-core[train]."""

from mezzo_core.bench.generation import time_latency as time_latency
from mezzo_core.bench.generation import time_step as time_step
from mezzo_core.bench.generation import time_throughput as time_throughput
from mezzo_core.bench.layer import Layer as Layer
from mezzo_core.bench.layer import build_layer as build_layer
from mezzo_core.bench.layer import check_layer as check_layer
from mezzo_core.bench.layer import check_mixers as check_mixers
from mezzo_core.bench.layer import compiled as compiled
from mezzo_core.bench.layer import time_layer as time_layer
from mezzo_core.bench.origin import commit as commit
from mezzo_core.bench.origin import origin as origin
from mezzo_core.bench.result import Header as Header
from mezzo_core.bench.result import Result as Result
from mezzo_core.bench.rows import Contender as Contender
from mezzo_core.bench.rows import Row as Row
from mezzo_core.bench.rows import run as run
from mezzo_core.bench.rows import timed as timed
from mezzo_core.bench.script import Options as Options
from mezzo_core.bench.script import run_script as run_script
from mezzo_core.bench.script import say as say
from mezzo_core.bench.timing import OOM as OOM
from mezzo_core.bench.timing import Timing as Timing
from mezzo_core.bench.timing import attempt as attempt
from mezzo_core.bench.timing import captured as captured
from mezzo_core.bench.timing import measure as measure
from mezzo_core.bench.timing import start_afresh as start_afresh
