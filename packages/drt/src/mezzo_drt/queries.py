"""The queries of landmarks, one for each group of upper layers, and retrieval by them."""

from mezzo_core.nn.linear import Linear
from torch import Tensor, nn

from mezzo_drt.retrieval import Reads, retrieve


class Queries(nn.ModuleList):
    """Turns the states of landmarks at the beginning of a group into queries, and retrieves.

    Attributes:
        num_retrieved: R, the chunks that a chunk reads.
        gumbel_noise: whether training adds noise to the scores, to explore.
        is_random: whether chunks are chosen at random.
        is_fixed: whether a chunk's query is its own key, without weights to learn.
    """

    def __init__(
        self,
        d_model: int,
        num_groups: int,
        num_retrieved: int,
        norm_eps: float,
        *,
        projections: bool,
        gumbel_noise: bool,
        is_random: bool,
        is_fixed: bool,
    ) -> None:
        """Create the projection of each group, or its norm."""
        super().__init__()
        self.num_retrieved, self.gumbel_noise = num_retrieved, gumbel_noise
        self.is_random, self.is_fixed = is_random, is_fixed
        for _ in range(0 if is_fixed else num_groups):
            query = Linear(d_model, d_model, bias=False) if projections else None
            self.append(query or nn.RMSNorm(d_model, eps=norm_eps))

    def retrieve(
        self, group: int, h: Tensor, own: Tensor, keys: Tensor, lo: Tensor, hi: Tensor
    ) -> Reads:
        """Retrieve for the chunk after each of N chunks; `keys`, `lo` and `hi` as in `retrieve`.

        `h` (B, N, C) are the states of the N chunks' landmarks where group number `group` begins,
        `own` (B, N, C) their keys.
        """
        return retrieve(
            own if self.is_fixed else self[group](h), keys, lo, hi, self.num_retrieved,
            noise=self.gumbel_noise and self.training,
            random_group=group if self.is_random else None,
        )  # fmt: skip
