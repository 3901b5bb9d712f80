"""flash-linear-attention: its checkpoints read and written, and our kernels in its models."""

from mezzo_gsa.fla.accelerate import accelerate_fla as accelerate_fla
from mezzo_gsa.fla.layout import KINDS as KINDS
from mezzo_gsa.fla.layout import load_fla as load_fla
from mezzo_gsa.fla.layout import to_fla as to_fla
