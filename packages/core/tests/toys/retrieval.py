"""A toy paper of the size of a stack: landmarks, retrieval of a past chunk, memory on the host.

After every L tokens a landmark runs through the recurrence and is dropped again. It looks for the
past chunk whose landmark fits best, which the tokens of the next chunk then read. What chunks hold
is kept in the host's memory, and fetched between two steps: the retrieval of DRT, in one vector.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from mezzo_core.nn import AbstractStack
from mezzo_core.nn.contract import run_eagerly
from mezzo_core.ops.checks import is_read
from mezzo_core.ops.gradients import saveable
from mezzo_core.ops.named_tuples import replaced  # torch 2.8 does not compile `_replace`
from mezzo_core.ops.padding import without_padding
from torch import Tensor, nn


class RetrievalState(NamedTuple):
    h: Tensor  # (B, C), the recurrence
    chunk: Tensor  # (B, C), the sum of the open chunk's outputs
    read: Tensor  # (B, C), what the open chunk has retrieved
    seen: Tensor  # (B,) int64, tokens
    landmarks: Tensor  # (B, N, C), of the chunks that are closed
    chosen: Tensor  # (B,) int64, the chunk that the last landmark chose; -1 if there was none
    weight: Tensor  # (B, 1), how much of it is read
    host_chunks: Tensor  # (B, N, C) in the host's memory, the mean output of each closed chunk
    host_closed: Tensor  # (B,) int64 in the host's memory, how many of them there are


@dataclass(frozen=True)
class RetrievalConfig:
    """Describes the stack."""

    chunk_size: int = 4

    def build(self, d_model: int) -> "RetrievalStack":
        return RetrievalStack(d_model, self)


class RetrievalStack(AbstractStack):
    """h = a h + Win norm(x), y = x + Wout h + Wread r; r is what the last landmark retrieved."""

    state_type = RetrievalState

    def __init__(self, d_model: int, config: RetrievalConfig) -> None:
        super().__init__()
        self.d_model, self.chunk_size = d_model, config.chunk_size
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.w_in, self.w_out, self.w_read, self.w_query = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.decay = nn.Parameter(torch.empty(d_model))
        self.landmark = nn.Parameter(torch.empty(d_model))

    def init_own_weights(self) -> None:
        nn.init.constant_(self.decay, 0.8)
        nn.init.normal_(self.landmark)

    def forward(self, x, state=None, *, cu_seqlens=None, lengths=None):
        self.check_input(x, state, cu_seqlens, lengths)
        B, T, _ = x.shape
        x = without_padding(x, lengths)
        device = self.w_in.weight.device
        begin = self._moved(self.init_state(B), device)
        s = begin if state is None else self._moved(state, device)
        s = self._with_room(s, T // self.chunk_size + 1)
        begin = self._with_room(begin, s.landmarks.shape[1])
        starts = torch.zeros(T + 1, dtype=torch.bool, device=x.device)
        if cu_seqlens is not None:
            starts[cu_seqlens[:-1].long()] = True
        outputs = []
        for t in range(T):
            if cu_seqlens is not None:
                s = _choose(starts[t].expand(B), begin, s)
            y, after = self._token(x[:, t], self._fetched(s))
            s = after if lengths is None else _choose(t < lengths, after, s)
            outputs.append(y)
        y = torch.stack(outputs, 1) if outputs else x
        return y, None if state is None else self._moved(s, torch.device("cpu"))

    def step(self, x, state):
        self.check_step(x, state)
        slots = state.landmarks.shape[1]
        if is_read(state.seen) and (state.seen // self.chunk_size >= slots).any():
            raise ValueError(f"state has room for {slots} chunks: reserve more")
        y, after = self._token(x[:, 0], state)
        for name, old, new in zip(RetrievalState._fields, state, after, strict=True):
            if not name.startswith("host_"):
                old.copy_(new)
        return y[:, None]

    def before_step(self, state, run=run_eagerly):
        """Move the chunk that has just been closed to the host, and fetch the one to be read."""
        now = self._fetched(state)
        for old, new in zip(state, now, strict=True):
            old.copy_(new)

    def reserve(self, state, num_tokens):
        self.check_reserve(state, num_tokens)
        return self._with_room(
            RetrievalState(*(x.clone() for x in state)), num_tokens // self.chunk_size + 1
        )

    def init_state(self, batch):
        C = self.d_model
        weight = self.w_in.weight
        vector, chunks = (
            torch.zeros(batch, *sizes, dtype=weight.dtype, device=weight.device)
            for sizes in ((C,), (0, C))
        )
        seen = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return RetrievalState(
            h=vector,
            chunk=vector,
            read=vector,
            seen=seen,
            landmarks=chunks,
            chosen=seen - 1,
            weight=vector[:, :1],
            host_chunks=chunks.cpu(),
            host_closed=seen.cpu(),
        )

    def state_bytes(self, num_tokens):
        size = self.w_in.weight.element_size()
        return ((num_tokens // self.chunk_size + 4) * self.d_model + 1) * size

    def host_state_bytes(self, num_tokens):
        slots = num_tokens // self.chunk_size + 1
        return slots * self.d_model * self.w_in.weight.element_size()

    def flops_per_token(self, num_tokens):
        return 8 * self.w_in.weight.numel()

    def _token(self, x: Tensor, s: RetrievalState) -> tuple[Tensor, RetrievalState]:
        """Run a token of every row, (B, C), and the landmark where the token ends a chunk."""
        h = self.decay * saveable(s.h) + self.w_in(self.norm(x))
        y = x + self.w_out(h) + self.w_read(s.read)
        seen = s.seen + 1
        token = replaced(s, h=h, chunk=s.chunk + y, seen=seen)
        return y, _choose(seen % self.chunk_size == 0, self._landmark(token), token)

    def _landmark(self, s: RetrievalState) -> RetrievalState:
        """Run the landmark, choose among the chunks of before, and close this one."""
        h = self.decay * s.h + self.w_in(self.norm(self.landmark)).expand_as(s.h)
        slot = torch.arange(s.landmarks.shape[1], device=h.device)
        number = s.seen // self.chunk_size - 1  # of the chunk that ends here
        scores = torch.einsum("bc,bnc->bn", self.w_query(h), s.landmarks) * self.d_model**-0.5
        scores = scores.masked_fill(slot >= number[:, None], float("-inf"))
        best, chosen = scores.max(-1)
        is_there = number > 0
        here = (slot == number[:, None])[..., None]
        return replaced(
            s,
            h=h,
            chosen=torch.where(is_there, chosen, -1),
            weight=torch.where(is_there, best, 0).sigmoid()[:, None],
            landmarks=torch.where(here, h[:, None], s.landmarks),
        )

    def _fetched(self, s: RetrievalState) -> RetrievalState:
        """Close chunks in the host's memory, and read what their landmarks chose."""
        home = s.host_closed.device
        number = (s.seen // self.chunk_size).to(home)
        is_new = number > s.host_closed
        slot = torch.arange(s.host_chunks.shape[1], device=home)
        here = (slot == (number - 1)[:, None]) & is_new[:, None]
        mean = (s.chunk / self.chunk_size).to(home)
        chunks = torch.where(here[..., None], mean[:, None], s.host_chunks)
        index = s.chosen.clamp(min=0).to(home)[:, None, None].expand(-1, 1, self.d_model)
        found = chunks.gather(1, index)[:, 0].to(s.h.device)
        found = torch.where((s.chosen >= 0)[:, None], found * s.weight, 0)
        now = is_new.to(s.h.device)[:, None]
        return replaced(
            s,
            read=torch.where(now, found, s.read),
            chunk=torch.where(now, 0, s.chunk),
            host_chunks=chunks,
            host_closed=number,
        )

    def _moved(self, s: RetrievalState, device: torch.device) -> RetrievalState:
        """Move what the host keeps to a device: a forward over many tokens computes there."""
        return replaced(
            s, host_chunks=s.host_chunks.to(device), host_closed=s.host_closed.to(device)
        )

    def _with_room(self, s: RetrievalState, chunks: int) -> RetrievalState:
        """Give a state room for so many chunks more, in slots of zeros."""
        landmarks, kept = (
            torch.cat([x, x.new_zeros(x.shape[0], chunks, self.d_model)], 1)
            for x in (s.landmarks, s.host_chunks)
        )
        return replaced(s, landmarks=landmarks, host_chunks=kept)


def _choose(rows: Tensor, a: RetrievalState, b: RetrievalState) -> RetrievalState:
    """Take the rows (B,) of `a` where they are True, and of `b` elsewhere."""
    return RetrievalState(
        *(
            x if x is y else torch.where(rows.view(-1, *[1] * (x.ndim - 1)), x, y)
            for x, y in zip(a, b, strict=True)
        )
    )
