"""ABC: slots without forget gates, written with strengths from raw scores."""

from mezzo_gsa.ops.abc.api import chunk_abc as chunk_abc
from mezzo_gsa.ops.abc.api import recurrent_abc as recurrent_abc
from mezzo_gsa.ops.abc.state import ABCOutput as ABCOutput
from mezzo_gsa.ops.abc.state import ABCState as ABCState
from mezzo_gsa.ops.abc.step import step_abc_ as step_abc_
from mezzo_gsa.ops.abc.strengths import Reading as Reading
