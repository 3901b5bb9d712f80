"""Gates and padding: the elementwise operations before a recurrence."""

from mezzo_gsa.ops.gates.elementwise import bounded_gate as bounded_gate
from mezzo_gsa.ops.gates.elementwise import log_gate as log_gate
from mezzo_gsa.ops.gates.padding import skip_padding as skip_padding
