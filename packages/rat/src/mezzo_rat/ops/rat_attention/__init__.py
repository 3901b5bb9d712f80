"""RAT attention: a gated recurrence inside chunks, softmax attention over the chunks' ends."""

from mezzo_rat.ops.rat_attention.api import RATAttentionOutput as RATAttentionOutput
from mezzo_rat.ops.rat_attention.api import chunk_rat_attention as chunk_rat_attention
from mezzo_rat.ops.rat_attention.api import (
    chunk_rat_attention_projected as chunk_rat_attention_projected,
)
from mezzo_rat.ops.rat_attention.api import recurrent_rat_attention as recurrent_rat_attention
from mezzo_rat.ops.rat_attention.api import step_rat_attention_ as step_rat_attention_
from mezzo_rat.ops.rat_attention.state import RATState as RATState
from mezzo_rat.ops.rat_attention.state import init_state as init_state
from mezzo_rat.ops.rat_attention.state import reserve as reserve
