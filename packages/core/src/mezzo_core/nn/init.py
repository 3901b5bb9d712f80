"""All initialization of a model, in one place."""

import torch
from torch import nn

from mezzo_core.nn.contract import AbstractSequenceModule


@torch.no_grad()
def init_weights(model: nn.Module, std: float = 0.02) -> None:
    """Initialize all weights of a model, with random numbers from torch's global generator.

    | Where                                          | Weight        | Start                    |
    |------------------------------------------------|---------------|--------------------------|
    | `nn.Embedding` (tied head included)            | `weight`      | N(0, std)                |
    | `nn.Linear`, wherever it is                    | `weight`      | N(0, std)                |
    | `nn.Linear`                                    | `bias`        | 0                        |
    | `nn.RMSNorm`, `nn.LayerNorm`, `nn.GroupNorm`   | `weight`      | 1                        |
    | `nn.LayerNorm`, `nn.GroupNorm`                 | `bias`        | 0                        |
    | a mixer, block or stack, by `init_own_weights` | its choice    | its own, after the above |

    No matrix is scaled with depth. Weights are drawn in the order of `model.modules()`, so
    `torch.manual_seed` determines all of them on a given kind of device. A parameter that is not in
    the table keeps the values of its constructor. On the meta device nothing is drawn.
    """
    for module in model.modules():
        if any(weight.is_meta for weight in module.parameters(recurse=False)):
            continue  # there is nothing to fill, but torch would take long
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm):
            if module.weight is not None:
                nn.init.ones_(module.weight)
            if not isinstance(module, nn.RMSNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
    init_own_weights(model)


def init_own_weights(module: nn.Module) -> None:
    """Call `init_own_weights` of a module's parts, then of the module, which may override them."""
    for part in module.children():
        init_own_weights(part)
    if isinstance(module, AbstractSequenceModule):
        module.init_own_weights()
