"""The ops of GSA and its family: functions on tensors, without weights."""

from mezzo_gsa.ops.abc import ABCOutput as ABCOutput
from mezzo_gsa.ops.abc import ABCState as ABCState
from mezzo_gsa.ops.abc import Reading as Reading
from mezzo_gsa.ops.abc import chunk_abc as chunk_abc
from mezzo_gsa.ops.abc import recurrent_abc as recurrent_abc
from mezzo_gsa.ops.abc import step_abc_ as step_abc_
from mezzo_gsa.ops.gates import bounded_gate as bounded_gate
from mezzo_gsa.ops.gates import log_gate as log_gate
from mezzo_gsa.ops.gates import skip_padding as skip_padding
from mezzo_gsa.ops.gla import GLAOutput as GLAOutput
from mezzo_gsa.ops.gla import LayerForm as LayerForm
from mezzo_gsa.ops.gla import chunk_gla as chunk_gla
from mezzo_gsa.ops.gla import recurrent_gla as recurrent_gla
from mezzo_gsa.ops.gla import step_gla_ as step_gla_
from mezzo_gsa.ops.gla import step_gla_layer_ as step_gla_layer_
from mezzo_gsa.ops.gsa import Between as Between
from mezzo_gsa.ops.gsa import GSAOutput as GSAOutput
from mezzo_gsa.ops.gsa import GSAState as GSAState
from mezzo_gsa.ops.gsa import chunk_gsa as chunk_gsa
from mezzo_gsa.ops.gsa import chunk_gsa_projected as chunk_gsa_projected
from mezzo_gsa.ops.gsa import recurrent_gsa as recurrent_gsa
from mezzo_gsa.ops.gsa import recurrent_gsa_projected as recurrent_gsa_projected
from mezzo_gsa.ops.gsa import step_gsa_ as step_gsa_
from mezzo_gsa.ops.gsa import step_gsa_projected_ as step_gsa_projected_
from mezzo_gsa.ops.norms import gated_norm as gated_norm
