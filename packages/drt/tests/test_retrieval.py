"""Retrieval chooses the best of the chunks that may be read, and weighs them."""

import pytest
import torch
from mezzo_drt import retrieval
from mezzo_drt.retrieval import retrieve

B, N, S, C, R = 2, 7, 9, 4, 3


def inputs(seed=0, num_chunks=S):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(B, N, C, generator=generator, dtype=torch.float64)
    keys = torch.randn(B, num_chunks, C, generator=generator, dtype=torch.float64)
    lo = torch.tensor([[0, 0, 0, 2, 2, 2, 8]])
    return queries, keys, lo, torch.arange(N)[None] + 2


def by_loops(queries, keys, lo, hi):
    """Return for each query a dict from the chosen chunks to their weights."""
    found = []
    for b in range(B):
        for n in range(N):
            between = range(int(lo[0, n]), int(hi[0, n]))
            scores = {j: queries[b, n] @ keys[b, j] / C**0.5 for j in between}
            best = sorted(scores, key=scores.__getitem__, reverse=True)[:R]
            total = sum(scores[j].exp() for j in best)
            found.append({j: scores[j].exp() / total for j in best})
    return found


@pytest.mark.parametrize("tiles", [(100, 2**20), (2, 2**20), (4, 1), (4, 20)])
def test_the_best_chunks_are_chosen_and_weighed(tiles, monkeypatch):
    monkeypatch.setattr(retrieval, "TILE_KEYS", tiles[0])
    monkeypatch.setattr(retrieval, "TILE_SCORES", tiles[1])
    products, sizes = retrieval._products, []

    def scored(*args):
        scores = products(*args)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(retrieval, "_products", scored)
    queries, keys, lo, hi = inputs()
    reads = retrieve(queries, keys, lo, hi, R, noise=False)
    assert max(sizes) <= max(B * tiles[0], tiles[1])
    expected = by_loops(queries, keys, lo, hi)
    assert [len(row) for row in expected[:N]] == [2, 3, 3, 3, 3, 3, 0]
    for indices, weights, row in zip(
        reads.indices.flatten(0, 1), reads.weights.flatten(0, 1), expected, strict=True
    ):
        got = {int(j): w for j, w in zip(indices, weights, strict=True) if j >= 0}
        assert got.keys() == row.keys()
        assert all(abs(got[j] - row[j]) < 1e-12 for j in row)
        assert (weights[indices < 0] == 0).all()


@pytest.mark.parametrize("tile", [100, 4])
def test_of_equal_random_numbers_the_earliest_are_taken(tile, monkeypatch):
    """`topk` takes any of them, others in another segmentation."""
    numbers = torch.randint(4, (1, 500, 7), generator=torch.Generator().manual_seed(0)).float()
    monkeypatch.setattr(retrieval, "TILE_KEYS", tile)
    monkeypatch.setattr(retrieval, "_random_numbers", lambda n, j, group: numbers[..., j[0, 0]])
    wanted = numbers.sort(dim=-1, descending=True, stable=True).indices
    chunks = torch.zeros(1, 500, C), torch.zeros(1, 7, C)
    lo, hi = (torch.full((1, 500), x) for x in (0, 7))
    for count in range(1, 8):
        found = retrieve(*chunks, lo, hi, count, noise=False, random_group=0).indices
        assert torch.equal(found, wanted[..., :count])


def test_scores_of_low_precision_are_those_of_float32():
    """In bfloat16 the best of many chunks would tie."""
    queries, keys = (x.bfloat16() for x in inputs(num_chunks=5000)[:2])
    wide, (lo, hi) = (queries.float(), keys.float()), (torch.full((1, N), x) for x in (0, 5000))
    wanted = retrieve(*wide, lo, hi, R, noise=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = retrieve(*wide, lo, hi, R, noise=False)
    for found in (retrieve(queries, keys, lo, hi, R, noise=False), cast):
        assert all(map(torch.equal, found, wanted))


def test_what_may_not_be_read_may_be_no_number():
    queries, keys, lo, hi = inputs()
    clean = retrieve(queries, keys, lo, hi.clamp(max=5), R, noise=False)
    keys[:, 5:] = float("nan")
    spoilt = retrieve(queries, keys, lo, hi.clamp(max=5), R, noise=False)
    assert all(torch.equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    queries, keys, lo, hi = inputs()
    keys[:, 0] = float("nan")  # whose place stands for no chunk
    leaves = queries.requires_grad_(), keys.requires_grad_()
    reads = retrieve(*leaves, lo.clamp(min=1), hi, R, noise=False)
    assert (reads.indices == -1).any()
    assert all(d.isfinite().all() for d in torch.autograd.grad(reads.weights.sin().sum(), leaves))


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_fewer_chunks_than_are_asked_for_are_all_read(num_chunks):
    queries, keys, lo, hi = inputs(num_chunks=num_chunks)
    reads = retrieve(queries, keys, lo * 0, hi.clamp(max=num_chunks), R, noise=False)
    assert reads.indices.shape == reads.weights.shape == (B, N, R)
    assert ((reads.indices >= 0).sum(-1) == num_chunks).all()
    assert torch.allclose(reads.weights.sum(-1), torch.tensor(float(num_chunks > 0)).double())


def test_gradients_are_those_of_the_weights_and_finite_where_nothing_is_read():
    queries, keys, lo, hi = inputs()
    queries.requires_grad_(), keys.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k: retrieve(q, k, lo, hi, R, noise=False).weights, (queries, keys)
    )
    weights = retrieve(queries, keys, lo, lo, R, noise=False).weights
    (dq,) = torch.autograd.grad(weights.sum(), queries)
    assert torch.equal(dq, torch.zeros_like(dq))
    with torch.autograd.set_detect_anomaly(True):  # which refuses NaNs, also where masks hide them
        torch.autograd.grad(retrieve(queries, keys, lo, hi, R, noise=False).weights.sum(), queries)


def test_noise_draws_a_chunk_by_the_softmax_of_the_scores():
    torch.manual_seed(0)
    queries, scores = torch.ones(1, 20_000, 1), torch.tensor([0.0, 1.0, 2.0])
    lo, hi = (torch.full((1, 20_000), x) for x in (0, 3))
    drawn = retrieve(queries, scores[None, :, None], lo, hi, 1, noise=True)
    shares = torch.stack([(drawn.indices == j).float().mean() for j in range(3)])
    assert (shares - scores.softmax(0)).abs().max() < 0.015
    assert (drawn.weights == 1).all()


def test_noise_changes_no_weight_of_a_choice():
    queries, keys, lo, hi = inputs()
    torch.manual_seed(0)
    noisy = retrieve(queries, keys, lo, hi, S, noise=True)
    quiet = retrieve(queries, keys, lo, hi, S, noise=False)
    order = [reads.indices.argsort(-1) for reads in (noisy, quiet)]
    sides = [r.weights.gather(-1, o) for r, o in zip((noisy, quiet), order, strict=True)]
    assert not torch.equal(noisy.indices, quiet.indices)
    assert torch.allclose(*sides)


def test_random_choices_are_even_and_stay_when_tokens_come_before():
    N = 4_000
    queries, keys = torch.randn(1, N, 2), torch.randn(1, 40, 2)
    hi = torch.full((1, N), 20)
    lo = torch.arange(N)[None] % 10
    fixed = [
        retrieve(queries, keys, start, start + hi, R, noise=False, random_group=0)
        for start in (lo, lo + 10)
    ]
    assert torch.equal(fixed[0].indices + 10, fixed[1].indices)
    assert not torch.equal(fixed[0].weights, fixed[1].weights)  # which are learned
    other = retrieve(queries, keys, lo, lo + hi, R, noise=False, random_group=1)
    assert not torch.equal(other.indices, fixed[0].indices)
    sizes = torch.arange(8, 8 + N)[None]
    many = torch.randn(1, N + 8, 2)
    spread = retrieve(queries, many, sizes * 0, sizes, 1, noise=False, random_group=0)
    share = spread.indices[0, :, 0] / sizes[0]
    assert abs(share.mean() - 0.5) < 0.02
    assert abs(share.var() - 1 / 12) < 0.01
    torch.manual_seed(0)
    noisy = [retrieve(queries, keys, lo, lo + hi, R, noise=True, random_group=0) for _ in range(2)]
    assert not torch.equal(*(reads.indices for reads in noisy))
