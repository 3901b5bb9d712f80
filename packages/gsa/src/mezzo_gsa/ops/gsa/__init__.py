"""Gated slot attention: each head has M slots, which a gate writes and a softmax reads."""

from mezzo_gsa.ops.gsa.api import chunk_gsa as chunk_gsa
from mezzo_gsa.ops.gsa.api import chunk_gsa_projected as chunk_gsa_projected
from mezzo_gsa.ops.gsa.api import recurrent_gsa as recurrent_gsa
from mezzo_gsa.ops.gsa.api import recurrent_gsa_projected as recurrent_gsa_projected
from mezzo_gsa.ops.gsa.arguments import Between as Between
from mezzo_gsa.ops.gsa.arguments import GSAOutput as GSAOutput
from mezzo_gsa.ops.gsa.arguments import GSAState as GSAState
from mezzo_gsa.ops.gsa.step import step_gsa_ as step_gsa_
from mezzo_gsa.ops.gsa.step import step_gsa_projected_ as step_gsa_projected_
