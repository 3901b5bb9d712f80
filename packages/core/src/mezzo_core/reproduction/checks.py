"""Checks without training: equalities in float64, and a paper's hyperparameters in our recipes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mezzo_core.nn.lm import LMConfig
from mezzo_core.papers import Claim, Finding, Measurement, ResultRow, Status


def equality(
    id: str, statement: str, ours: Tensor, expected: Tensor, tolerance: float = 1e-6
) -> Finding:
    """Check that two tensors are equal as the method says, by their relative error.

    Args:
        id: id of the check.
        statement: the equality in words.
        ours: the tensor that the package computes.
        expected: the tensor that it should equal.
        tolerance: allowed relative error; it covers RoPE's angles, which are float32.
    """
    error = float((ours - expected).norm() / expected.norm())
    return Finding(
        id,
        "check",
        Status.REPRODUCED if error <= tolerance else Status.DIFFERS,
        f"{statement}: relative error {error:.1e} in float64 (bound {tolerance:.0e})",
    )


def decode_equals_prefill(id: str, config: LMConfig, layers: str) -> Finding:
    """Check that decoding step by step, after a prefill, gives the logits of one full forward.

    Args:
        id: id of the check.
        config: configuration of a small model.
        layers: description of its layers in words.
    """
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
        id,
        f"a prefill of {prefill} tokens and {T - prefill} steps in place give the logits of one "
        f"full forward ({layers})",
        torch.cat([output.logits, *steps], dim=1),
        full,
    )


def compare_setup(
    claim: Claim, ours: Mapping[str, float], recipes: str, rounded: Mapping[str, float]
) -> Finding:
    """Compare the hyperparameters that a paper prints with our recipes, value by value.

    Args:
        claim: the claim with the printed values and their labels.
        ours: our values by the same labels, without those that no recipe has (number of GPUs).
        recipes: names of the recipes with these values, in words.
        rounded: relative tolerances of the labels whose values are printed rounded. The values of
            other labels must be equal.
    """
    everything = claim.labelled()
    printed = {label: float(value) for label, value in everything.items() if label in ours}
    left_out = [label for label in everything if label not in ours]
    wrong = [
        label
        for label, value in printed.items()
        if abs(ours[label] - value) > rounded.get(label, 1e-12) * value
    ]
    every = f"all {len(printed)} printed values" if len(printed) > 1 else "the printed value"
    summary = f"our recipes have {every}"
    if wrong:
        summary = "our recipes differ in " + ", ".join(wrong)
    precision = "; token counts to the printed precision" if rounded else ""
    if left_out:
        summary += f" (left out: {', '.join(left_out)})"
    return Finding(
        claim.id,
        "claim",
        Status.DIFFERS if wrong else Status.REPRODUCED,
        f"{summary}{precision}; nothing was trained",
        (
            Measurement(
                ("printed", "ours"),
                tuple(ResultRow(label, ((printed[label], ours[label]),)) for label in printed),
                recipes,
            ),
        ),
    )
