"""Speed and memory of the ops, of one layer and of tiny models, beside fla and softmax attention."""

from mezzo_gsa.bench.run import bench as bench
