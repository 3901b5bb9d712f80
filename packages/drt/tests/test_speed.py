"""Measurements of speed on a CPU measure what they claim to measure."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from mezzo_drt.recipes import tiny
from mezzo_drt.reproduction import speed
from mezzo_drt.reproduction.claims import REPRODUCTION
from mezzo_drt.reproduction.decoding_speed import read
from mezzo_drt.reproduction.speed import (
    CAN_OFFLOAD,
    DRT1,
    DRY,
    LANDMARK,
    OFFLOADED,
    PAPER,
    SPEEDS,
    WINDOW,
    model_config,
)


def quiet(line):
    pass


def test_the_state_is_what_a_prompt_leaves(tmp_path):
    sizes = replace(DRY, new_tokens=2)
    ours = SPEEDS.measure("inference", sizes, tmp_path, quiet)
    memory = OFFLOADED[False][1]
    for (group, model), offload in product(ours.rows, OFFLOADED):
        if offload and model not in CAN_OFFLOAD:
            continue
        drt = replace(tiny().drt, offload=offload)
        lm = model_config(model, replace(tiny(), drt=drt)).build()
        room = DRY.prompts[group] + 2 * 16 + 2 + 3 * sizes.new_tokens
        told = (lm.state_bytes(room) + lm.host_state_bytes(room)) / 1e9
        found = ours.by_seed(model, OFFLOADED[offload][1], group)
        assert found[0] == pytest.approx(told, rel=0.1)
    longer = [ours.typical(DRT1, memory, group) for group in DRY.prompts]
    assert longer[0] < longer[1]
    # On a CPU both sides are one: offload has what is fetched, or kept near, besides.
    for model, group in product((DRT1, LANDMARK), DRY.prompts):
        assert ours.typical(model, OFFLOADED[True][1], group) > ours.typical(model, memory, group)


def test_a_text_is_read_whole():
    lm = model_config(DRT1, tiny()).build().eval()
    for T in DRY.texts:
        places = read(lm, T, DRY.segment).num_places()
        assert places.tolist() == [T + T // tiny().drt.chunk_size]  # with landmarks
    assert PAPER.texts[-1] == 2**24
    assert PAPER.segment % speed.SIZES[PAPER.size]().drt.chunk_size == 0


def test_a_sequences_time_is_its_share_of_the_step(tmp_path):
    for entry in SPEEDS.measure("length", replace(DRY, models=(DRT1,)), tmp_path, quiet).entries:
        B, T = entry.details["B"], int(entry.column)
        assert DRY.tokens == B * T
        assert entry.value * entry.details["tokens_per_second"] == pytest.approx(1e3 * T, rel=1e-3)


def test_a_full_run_has_the_lengths_that_the_claims_read():
    assert {"4096", "16384", "65536"} <= set(map(str, PAPER.lengths))
    table = REPRODUCTION.published.by_id["drt.table4.throughput"]
    assert tuple(PAPER.trained) == table.columns
    printed = REPRODUCTION.published.by_id["drt.table3"]
    assert sum(OFFLOADED.values(), ()) == printed.columns[2:]
    assert {str(row.values[0]) for row in printed.rows} == set(PAPER.prompts)
    for name, s in PAPER.trained.items():
        with torch.device("meta"):
            weights = model_config(WINDOW, s).build().num_parameters()
        size, length = name.split(", ")
        factor = {"M": 1e6, "B": 1e9}[size[-1]]
        assert weights == pytest.approx(float(size[:-1]) * factor, rel=0.05)
        assert s.seq_len == int(length[:-1]) * 1024


@pytest.mark.gpu
def test_all_speeds_run_on_a_gpu(tmp_path):
    one = dict(list(DRY.trained.items())[:1])  # each cell is compiled
    sizes = replace(DRY, device="cuda", trained=one, lengths=DRY.lengths[:1])
    for name in SPEEDS.makers:
        ours = SPEEDS.measure(name, sizes, tmp_path, quiet)
        wrong = [entry for entry in ours.entries if entry.value != "OOM" and entry.value <= 0]
        assert not wrong
