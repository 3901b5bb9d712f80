"""Speed and memory of the ops and of one layer, beside fla and softmax attention."""

from mezzo_gsa.bench.run import PARTS as PARTS
from mezzo_gsa.bench.run import bench as bench
