"""What needs no training: values beside printed ones."""

from collections.abc import Mapping

from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim, Value


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
