"""The ops of RAT: functions on tensors, without weights.

`gated_scan` is a function here, although there is a folder of the same name. To import a module of
that folder, write `from mezzo_rat.ops.gated_scan import api`. `linear_scan` is mezzo-core's.
"""

from mezzo_core.ops.scan import ScanOutput as ScanOutput
from mezzo_core.ops.scan import linear_scan as linear_scan

from mezzo_rat.ops.gated_scan import GatedScanOutput as GatedScanOutput
from mezzo_rat.ops.gated_scan import gated_scan as gated_scan
from mezzo_rat.ops.rat_attention import RATAttentionOutput as RATAttentionOutput
from mezzo_rat.ops.rat_attention import RATState as RATState
from mezzo_rat.ops.rat_attention import chunk_rat_attention as chunk_rat_attention
from mezzo_rat.ops.rat_attention import (
    chunk_rat_attention_projected as chunk_rat_attention_projected,
)
from mezzo_rat.ops.rat_attention import init_state as init_state
from mezzo_rat.ops.rat_attention import recurrent_rat_attention as recurrent_rat_attention
from mezzo_rat.ops.rat_attention import reserve as reserve
from mezzo_rat.ops.rat_attention import step_rat_attention_ as step_rat_attention_
