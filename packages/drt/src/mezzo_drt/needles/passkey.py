"""One needle: a passkey in a text, asked for at the end (the paper's single NIAH, Table 5)."""

from dataclasses import dataclass

from mezzo_drt.needles.task import AbstractNeedleConfig, Riddle, Words


@dataclass(frozen=True)
class PasskeyConfig(AbstractNeedleConfig):
    """`The passkey is: <key>.` in a text, and `What is the passkey? The passkey is <key>`.

    Attributes:
        key_tokens: tokens of the key, each any token but the end token.
        depth: where the needle is in every row, from 0 (at the text's beginning) to 1 (right before
            the question); None draws its place uniformly.
    """

    key_tokens: int = 10
    depth: float | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return "passkey"

    @property
    def names_needed(self) -> tuple[int, int]:
        """One name, the key, and its size."""
        return 1, self.key_tokens

    def limits(self) -> dict[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "key_tokens": (1 <= self.key_tokens <= 1000, "from 1 to 1000"),
            "depth": (self.depth is None or 0 <= self.depth <= 1, "from 0 to 1"),
        }

    def riddle(self, words: Words) -> Riddle:
        """Draw a key and its place."""
        (key,) = words.names(1, self.key_tokens)
        return Riddle(
            needles=(words.write("\nThe passkey is: ", key, ".\n"),),
            depths=(words.draw.random() if self.depth is None else self.depth,),
            question=words.write("\nWhat is the passkey? The passkey"),
            cue=words.write(" is "),
            answer=key,
        )
