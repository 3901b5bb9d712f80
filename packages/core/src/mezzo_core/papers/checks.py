"""What needs no training: equal tensors, decoding as in the forward, what a layer costs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mezzo_core.nn.contract import SequenceConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement, Outcome
from mezzo_core.papers.measurement import Entry, How, Measurement, entries
from mezzo_core.papers.published import Claim, Value

LENGTHS = tuple(2**i for i in range(10, 19))


def equality(statement: str, ours: Tensor, expected: Tensor, tolerance: float = 1e-6) -> Judgement:
    """Compare two tensors that the method says are equal, by their relative error.

    Args:
        statement: the equality in words.
        ours: the tensor that the package computes.
        expected: the tensor that it should equal.
        tolerance: allowed relative error; it covers RoPE's angles, which are float32.
    """
    error = float((ours - expected).norm() / expected.norm())
    return Judgement(
        Outcome.AGREES if error <= tolerance else Outcome.DIFFERS,
        f"{statement}: relative error {error:.1e} in float64 (bound {tolerance:.0e})",
    )


def decode_equals_prefill(id: str, config: LMConfig, layers: str) -> Check:
    """Check that decoding step by step, after a prefill, gives the logits of one full forward.

    Args:
        id: id of the check.
        config: configuration of a small model.
        layers: description of its layers in words.
    """

    def work() -> Judgement:
        T, prefill = 75, 37
        torch.manual_seed(0)
        model = config.build().double().eval()
        tokens = torch.randint(config.vocab_size, (2, T))
        with torch.no_grad():
            full = model(tokens).logits
            output = model(tokens[:, :prefill], model.init_state(2))
            state = model.reserve(output.state, T - prefill)
            steps = []
            for t in range(prefill, T):
                model.before_step(state)
                steps.append(model.step(tokens[:, t : t + 1], state))
        return equality(
            f"a prefill of {prefill} tokens and {T - prefill} steps in place give the logits of "
            f"one full forward ({layers})",
            torch.cat([output.logits, *steps], dim=1),
            full,
        )

    return Check(id, work)


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
