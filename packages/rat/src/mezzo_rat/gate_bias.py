"""The initial bias of the forget gates: they start with memories of different lengths."""

import torch
from torch import Tensor


@torch.no_grad()
def init_gate_bias(bias: Tensor, span: int) -> None:
    """Fill the bias of forget-gate logits with log u, u ~ Uniform(1, span - 1).

    A gate of sigmoid(log u) = u / (u + 1) forgets a share of 1 / (u + 1) at each token. So it
    remembers about u + 1 tokens, at most the span. With a span of 1 there is nothing to remember,
    and the bias is 0.
    """
    if span <= 1:
        bias.zero_()
    else:
        bias.uniform_(1.0, max(span - 1.0, 1.0)).log_()
