"""The scales of a reproduction (`--scale`), and the models that it trains."""

from dataclasses import dataclass, replace

from mezzo_core.reproduction import training
from mezzo_core.reproduction.training import Budget

from mezzo_gsa.recipes import ABLATION, PAPER_NAMES, RECIPES

ABC, CONSTANT = ABLATION["abc"], ABLATION["gsa_constant_decay"]
MODELS = {
    PAPER_NAMES["gsa"]: RECIPES["tiny_gsa"],
    CONSTANT: RECIPES["tiny_gsa_constant_decay"],
    ABC: RECIPES["tiny_abc"],
    PAPER_NAMES["attention"]: RECIPES["tiny_attention"],
}
"""The models that are trained, by the paper's names: those of section 4.1.3, and Transformer++."""


@dataclass(frozen=True)
class Scale:
    """How much one reproduction runs.

    Attributes:
        budget: of the tiny trainings.
        sample_tokens: length of the sample text.
        threads: of this process; None keeps torch's choice.
    """

    budget: Budget
    sample_tokens: int
    threads: int | None


CPU = Scale(replace(training.CPU, steps=200), sample_tokens=400, threads=None)
SMOKE = Scale(training.SMOKE, sample_tokens=20, threads=1)
SCALES = {"cpu": CPU, "smoke": SMOKE}
