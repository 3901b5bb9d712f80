"""All initialization of a model, in one place."""

import torch
from torch import nn

from mezzo_core.nn.mixer import AbstractMixer


@torch.no_grad()
def init_weights(model: nn.Module, std: float = 0.02) -> None:
    """Draw every weight anew from torch's global generator.

    | Where                                 | Weight        | Start                             |
    |---------------------------------------|---------------|-----------------------------------|
    | `nn.Embedding` (tied head included)   | `weight`      | N(0, std)                         |
    | `nn.Linear`, wherever it is           | `weight`      | N(0, std)                         |
    | `nn.Linear`                           | `bias`        | 0                                 |
    | `nn.RMSNorm`, `nn.LayerNorm`          | `weight`      | 1                                 |
    | `nn.LayerNorm`                        | `bias`        | 0                                 |
    | a mixer, by its `init_gates()`        | what it names | its own table, after all the rest |

    No matrix is scaled with depth. Weights are drawn in the order of `model.modules()`, so one
    `torch.manual_seed` fixes all of them on one kind of device. A parameter that no line names
    keeps what its constructor gave. On the meta device nothing is drawn.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            if module.weight is not None:
                nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, AbstractMixer):
            module.init_gates()
