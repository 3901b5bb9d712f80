"""Checks without training: two tensors are equal in float64, and decoding equals the forward."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers.claims import Check
from mezzo_core.papers.criteria import Judgement, Outcome
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim, Value


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
            steps = [model.step(tokens[:, t : t + 1], state) for t in range(prefill, T)]
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
    everything = claim.labelled()
    left_out = [label for label in everything if label not in ours]
    rows = {label: (value, ours[label]) for label, value in everything.items() if label in ours}
    words = f"; left out: {', '.join(left_out)}" if left_out else ""
    columns = ("printed", "ours")
    return Measurement(
        entries(rows, columns), columns, f"{setting}{words}; nothing was trained", How.PAPER
    )
