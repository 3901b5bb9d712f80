"""The law of programs: after any operations on states, outputs equal those of whole sequences."""

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.rewinding import Kept, Rewinding
from mezzo_core.nn.state_file import load_state, save_state
from mezzo_core.testing.isolation import decode_step, normal
from mezzo_core.testing.numerics import assert_close

ROOM = 5
"""How far the states of these programs can go back."""


def check_programs(
    module: AbstractSequenceModule,
    *,
    programs: int = 2,
) -> None:
    """Assert that random programs of all verbs give what whole forwards give, and refuse the rest.

    The verbs are forward, with padding, reserve and step, fork, select, reset, rollback (of all
    rows alike, or of each by a number of its own), save and load.
    """
    with torch.no_grad():
        _check_refusals(module)
        _check_autocast(module)
        for i in range(programs):
            program = _Program(module, i)
            chosen = program.draw.choices(VERBS, k=12)
            first = _Program.forward if i % 2 else _Program.steps_and_back
            for verb in (first, *chosen, _Program.forward, _Program.steps):
                verb(program)


class _Program:
    """A state of a few rows, and each row's tokens so far, whose whole forward it must match."""

    def __init__(self, module: AbstractSequenceModule, seed: int) -> None:
        self.module, self.whole = Rewinding(module, ROOM), module
        self.draw = random.Random(seed)
        self.state: Any = module.init_state(3)
        self.rows = [normal(module, (0, module.d_model), seed) for _ in range(3)]
        self.floor = [0] * 3  # each row can go back to so many tokens
        self.told: list[str] = []

    def new(self, num_tokens: int) -> Tensor:
        seed = self.draw.randrange(2**31)
        return normal(self.whole, (len(self.rows), num_tokens, self.whole.d_model), seed)

    def forward(self) -> None:
        x = self.new(self.draw.choice([1, 2, 4, 3 * ROOM]))
        lengths = [self.draw.randint(0, x.shape[1]) for _ in self.rows]
        if self.draw.random() < 0.5:
            lengths = [x.shape[1]] * len(self.rows)
        self.told.append(f"forward {lengths}")
        y, self.state = self.module(x, self.state, lengths=torch.tensor(lengths, device=x.device))
        self.follow(x, y, lengths)

    def steps(self) -> None:
        num_steps = self.draw.randint(1, 2 * ROOM)
        self.state = self.module.reserve(self.state, num_steps)
        self.decode(num_steps)

    def decode(self, num_steps: int) -> None:
        self.told.append(f"{num_steps} steps")
        x = self.new(num_steps)
        y = torch.cat([decode_step(self.module, token, self.state) for token in x.split(1, 1)], 1)
        self.follow(x, y, [num_steps] * len(self.rows))

    def steps_and_back(self) -> None:
        """Step in room that is reserved once, and go back between the steps."""
        self.told.append("room once")
        if not isinstance(self.state, Kept):
            self.state = self.module.begin(self.state)
        self.state = self.module.reserve(self.state, 3 * ROOM)
        for n in (1, 2, 0):
            self.decode(ROOM)
            self.go_back([n] * len(self.rows))

    def rollback(self) -> None:
        n = [
            self.draw.randint(0, len(row) - floor)
            for row, floor in zip(self.rows, self.floor, strict=True)
        ]
        self.go_back(n if self.draw.random() < 0.5 else [min(n)] * len(n))

    def go_back(self, n: list[int]) -> None:
        amount: int | Tensor = n[0]
        if len(set(n)) > 1 or self.draw.random() < 0.5:
            amount = torch.tensor(n, device=self.state.age.device)
        self.state = self.module.rollback(self.state, amount)
        self.told.append(f"rollback {n}")
        self.rows = [row[: len(row) - less] for row, less in zip(self.rows, n, strict=True)]

    def fork(self) -> None:
        self.told.append("fork")
        fork = self.module.fork(self.state)
        _, after = self.module(self.new(3), self.module.rollback(fork, 0))
        decode_step(self.module, self.new(1), self.module.reserve(after, 1))

    def select(self) -> None:
        chosen = [self.draw.randrange(len(self.rows)) for _ in self.rows]
        self.told.append(f"select {chosen}")
        self.state = self.module.select(self.state, chosen)
        self.rows = [self.rows[row] for row in chosen]
        self.floor = [self.floor[row] for row in chosen]

    def reset(self) -> None:
        row = self.draw.randrange(len(self.rows))
        self.told.append(f"reset {row}")
        self.state = self.module.reset(self.state, [row])
        self.rows[row], self.floor[row] = self.rows[row][:0], 0

    def save_and_load(self) -> None:
        self.told.append("save and load")
        with TemporaryDirectory() as folder:
            save_state(self.module, self.state, Path(folder) / "state")
            self.state, _ = load_state(self.module, Path(folder) / "state")

    def follow(self, x: Tensor, y: Tensor, lengths: list[int]) -> None:
        """Compare the outputs of each row's new tokens with those of a whole forward."""
        for i, length in enumerate(lengths):
            self.rows[i] = torch.cat([self.rows[i], x[i, :length]])
            self.floor[i] = max(self.floor[i], len(self.rows[i]) - ROOM)
            if length:
                whole = self.whole(self.rows[i][None])[0][0, -length:]
                name = f"row {i} after {', '.join(self.told)}"
                assert_close(name, y[i, :length], whole, rtol=1e-5)


VERBS: list[Callable[[_Program], None]] = [
    _Program.forward,
    _Program.steps,
    _Program.rollback,
    _Program.rollback,
    _Program.fork,
    _Program.select,
    _Program.reset,
    _Program.save_and_load,
]


def _check_autocast(module: AbstractSequenceModule) -> None:
    """Assert that states which autocast makes in bfloat16 go back too."""
    rewinding = Rewinding(module, 2)
    x = normal(module, (2, 17, module.d_model), 0)
    with torch.autocast(x.device.type, torch.bfloat16):
        whole = module(x)[0]
        state = rewinding.reserve(rewinding(x[:, :1], rewinding.init_state(2))[1], 10)
        for token in x[:, 1:11].split(1, 1):
            decode_step(rewinding, token, state)
        y, _ = rewinding(x[:, 9:], rewinding.rollback(state, 2))
    assert_close("autocast, gone back", y, whole[:, 9:], rtol=0.1)


def _check_refusals(module: AbstractSequenceModule) -> None:
    """Assert that going back too far is refused, and that going back by nothing changes nothing."""
    rewinding = Rewinding(module, ROOM)
    x = normal(module, (2, 2, module.d_model), 0)
    with TemporaryDirectory() as folder:
        save_state(rewinding, rewinding.init_state(2), Path(folder) / "state")
        first, _ = load_state(rewinding, Path(folder) / "state")
    _, state = rewinding(x, first)
    same = rewinding(x, rewinding.rollback(rewinding.fork(state), 0))[0]
    assert torch.equal(same, rewinding(x, state)[0]), "going back by nothing changed the state"
    if state.inputs.numel():
        try:
            Rewinding(module, ROOM + 1).rollback(state, 0)
        except ValueError as error:
            assert "can go back by" in str(error), str(error)  # noqa: PT017
        else:
            raise AssertionError("a state with another room to go back was not refused")
    if x.is_cuda:
        return
    for n, words in (
        (ROOM + 1, f"n must be at most {ROOM}, the room"),
        (torch.tensor([1, 3]), "n must be at most 2 in row 1, which can go back no further, got 3"),
        (torch.tensor([1, -1]), f"n must be from 0 to {ROOM}"),
        (-1, "n must be 0 or more"),
    ):
        try:
            rewinding.rollback(state, n)
        except ValueError as error:
            assert words in str(error), str(error)  # noqa: PT017
        else:
            raise AssertionError(f"rollback by {n} was not refused")
