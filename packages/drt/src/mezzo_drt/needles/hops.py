"""Chains of needles, with other chains as noise (the paper's 2-hop NIAH, Table 5)."""

from dataclasses import dataclass
from itertools import pairwise

from mezzo_drt.needles.task import AbstractNeedleConfig, Riddle, Words


@dataclass(frozen=True)
class HopsConfig(AbstractNeedleConfig):
    """Chains of names, with a needle `DEF <a>-><b>` for each hop, and a question about one chain.

    The needles are at independent places, uniform over the text, so in any order. The question is
    `The path from <a> is: <b>, <c>`.

    Attributes:
        num_hops: hops of each chain, which has one more name.
        num_noise: chains besides the one that is asked for.
        name_tokens: tokens of a name, each any token but the end token.
    """

    num_hops: int = 2
    num_noise: int = 1
    name_tokens: int = 5

    @property
    def name(self) -> str:
        """The name of the task."""
        return f"{self.num_hops}-hop"

    @property
    def names_needed(self) -> tuple[int, int]:
        """The number of names in all chains, and their size."""
        return (self.num_hops + 1) * (self.num_noise + 1), self.name_tokens

    def limits(self) -> dict[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "num_hops": (1 <= self.num_hops <= 1000, "from 1 to 1000"),
            "num_noise": (0 <= self.num_noise <= 1000, "from 0 to 1000"),
            "name_tokens": (1 <= self.name_tokens <= 1000, "from 1 to 1000"),
        }

    def riddle(self, words: Words) -> Riddle:
        """Draw the names and the places of the needles; the first chain is asked for."""
        names = words.names(*self.names_needed)
        size = self.num_hops + 1
        chains = [names[i : i + size] for i in range(0, len(names), size)]
        needles = tuple(
            words.write("\nDEF ", a, "->", b, "\n") for chain in chains for a, b in pairwise(chain)
        )
        first, *path = chains[0]
        answer = [part for name in path for part in (", ", name)]
        return Riddle(
            needles=needles,
            depths=words.draw.random(len(needles)).tolist(),
            question=words.write("\nThe path from ", first),
            cue=words.write(" is: "),
            answer=words.write(*answer[1:]),
        )
