"""What needs no training: values beside printed ones, what a layer costs."""

from collections.abc import Mapping

import torch

from mezzo_core.nn.contract import SequenceConfig
from mezzo_core.papers.measurement import Entry, How, Measurement, entries
from mezzo_core.papers.published import Claim, Value

LENGTHS = tuple(2**i for i in range(10, 19))


def beside_printed(claim: Claim, ours: Mapping[str, Value], setting: str) -> Measurement:
    """Put our values beside those of the paper that have the same labels, for `Equal`.

    Labels that we have no value for (number of GPUs) are named in the setting.
    """
    printed = {label: value for label, value in claim.labelled().items() if label in ours}
    left_out = ", ".join(label for label in claim.labels if label not in ours)
    words = f"; left out: {left_out}" if left_out else ""
    return beside(printed, ours, f"{setting}{words}")


def beside(printed: Mapping[str, Value], ours: Mapping[str, Value], setting: str) -> Measurement:
    """Put our values beside printed ones by their labels, for `Equal`."""
    rows = {label: (value, ours[label]) for label, value in printed.items()}
    columns, setting = ("printed", "ours"), f"{setting}; nothing was trained"
    return Measurement(entries(rows, columns), columns, setting, How.PAPER)


def layer_costs(layers: Mapping[str, SequenceConfig], width: int = 2048) -> Measurement:
    """Compute what one layer of C = `width` of each kind costs by length, from its formulas."""
    entries = []
    for name, config in layers.items():
        with torch.device("meta"):
            mixer = config.build(width).bfloat16()
        for T in LENGTHS:
            flops, state = mixer.flops_per_token(T) / 1e6, mixer.state_bytes(T) / 2**20
            entries.append(Entry(name, str(T), flops, "forward MFLOPs a token"))
            entries.append(Entry(name, str(T), state, "MiB of state a sequence"))
    setting = f"by the formulas of each mixer, C = {width}, the state in bfloat16"
    columns = tuple(map(str, LENGTHS))
    return Measurement(tuple(entries), columns, setting, title="What one layer costs by length")
