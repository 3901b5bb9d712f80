"""The ops of RAT: functions on tensors, without weights.

`gated_scan` and `linear_scan` are functions here, although there are folders of the same names. To
import a module of such a folder, write `from mezzo_rat.ops.gated_scan import api`.
"""

from mezzo_rat.ops.gated_scan import GatedScanOutput as GatedScanOutput
from mezzo_rat.ops.gated_scan import gated_scan as gated_scan
from mezzo_rat.ops.linear_scan import ScanOutput as ScanOutput
from mezzo_rat.ops.linear_scan import linear_scan as linear_scan
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
