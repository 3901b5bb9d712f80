"""The paper's theorems, as layers of this package whose weights are set by hand.

A theorem holds if such a layer computes what the theorem says, up to rounding in float64.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from mezzo_recurrent_transformer.block import RecurrentBlock, RecurrentBlockConfig
from mezzo_recurrent_transformer.transformer import TransformerBlock, TransformerBlockConfig
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional as F

T, C, HEADS = 9, 12, 3
"""Tokens, and width and heads of the simulated Transformer."""
BARE = {"norm": "none", "alibi": None}
ALPHA = 0.7


def check_equal(found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Check that in each pair ours equals the theorem's, up to rounding."""
    for name, (ours, right) in found.items():
        assert ours.dtype == torch.float64
        assert (ours - right).norm() <= 1e-10 * right.norm(), name


def test_layer_update():
    """Compare a layer, and the pairs that it stores, with the paper's equations for every head."""
    block = random_weights(RecurrentBlockConfig(C // HEADS, alibi=None, residual_scale=0.5), C)
    x, weights = random_inputs(C, C)
    norms = (block.attention_norm, block.mlp_norm, block.q_norm, block.k_norm)
    with torch.no_grad():
        for norm, weight in zip(norms, weights, strict=False):
            norm.get_parameter("weight").copy_(1 + weight / 4)
    z, state = block(x[None], block.init_state(1))
    right = layer_by_equations(block, x)
    found = zip(("z", "k", "v"), (z[0], state.k[0], state.v[0]), right, strict=True)
    check_equal({name: (ours, theirs) for name, ours, theirs in found})


def layer_by_equations(block: RecurrentBlock, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute z (T, C), k and v (T, H, D) of a layer of block_size 1 without ALiBi, head by head.

    It shares no code with the op, so a common mistake is unlikely.
    """
    D, r, eps = block.config.head_dim, block.config.residual_scale, block.config.norm_eps

    def rms(norm: nn.Module, y: Tensor) -> Tensor:
        return norm.get_parameter("weight") * y / torch.sqrt(y.square().mean() + eps)

    def pair(y: Tensor) -> tuple[Tensor, Tensor]:
        normal = rms(block.attention_norm, y)
        key = rms(block.k_norm, block.wk.weight @ normal)
        return key.view(-1, D), (block.wv.weight @ normal).view(-1, D)

    z, keys, values = list[Tensor](), list[Tensor](), list[Tensor]()
    for token in x:
        query = rms(block.q_norm, block.wq.weight @ rms(block.attention_norm, token)).view(-1, D)
        key, value = pair(token)
        attended = []
        for h in range(block.num_heads):
            seen = torch.stack([*(k[h] for k in keys), key[h]])
            weights = torch.softmax(seen @ query[h] / math.sqrt(D), 0)
            attended.append(weights @ torch.stack([*(v[h] for v in values), value[h]]))
        inner = token + r * (block.wo.weight @ torch.cat(attended))
        hidden = F.gelu(block.mlp.up.weight @ rms(block.mlp_norm, inner))
        z.append(inner + r * (block.mlp.down.weight @ hidden))
        key, value = pair(z[-1])
        keys.append(key)
        values.append(value)
    return torch.stack(z), torch.stack(keys), torch.stack(values)


def test_rms_definition():
    """Compare the norm of a layer whose weights are untrained with sqrt(D) x / |x|."""
    (x,) = random_inputs(C)
    norm = RecurrentBlockConfig(C, norm_eps=1e-12).build(C).double().attention_norm
    right = math.sqrt(C) * x / x.norm(dim=-1, keepdim=True)
    check_equal({"RMS(x)": (norm(x), right)})


def test_simulate_transformer():
    """Simulate a Transformer of three layers, and compare what each of them puts out."""
    found = {}
    config = TransformerBlockConfig(C // HEADS, **BARE, residual_scale=0.6)  # type: ignore[arg-type]
    x, anything = random_inputs(C, C)
    y, stream = x, torch.cat([x, anything, torch.zeros_like(x)], -1)
    for i in range(3):
        layer = random_weights(config, C, seed=i)
        carry, live = ((0, 1), (1, 0))[i % 2]  # each layer reads the block that the last one wrote
        y, stream = run(layer, y), run(simulating(layer, (carry, live, 2)), stream)
        found[f"layer {i + 1}"] = (stream[:, C * live : C * (live + 1)], y)
    check_equal(found)


def test_simulate_single_layer():
    """Simulate one layer at twice its width: the output takes the place of the scratch block."""
    layer = random_weights(TransformerBlockConfig(C // HEADS, **BARE), C)  # type: ignore[arg-type]
    (x,) = random_inputs(C)
    z = run(simulating(layer, (0, 1)), torch.cat([x, torch.zeros_like(x)], -1))
    right = torch.cat([x, run(layer, x)], -1)
    check_equal({"(x; y)": (z, right)})


def test_simulation_maps():
    """Compare the maps of the simulating layer with those of the proof; one head, as there."""
    layer = random_weights(TransformerBlockConfig(C, **BARE), C)  # type: ignore[arg-type]
    ours = simulating(layer, (0, 1, 2), one_head=True)
    x, anything, a = random_inputs(C, C, C)
    zero = torch.zeros_like(x)
    inside = torch.cat([x, anything, a], -1)
    written = x + a + layer.mlp(x + a) - anything
    scale = math.sqrt(3)  # our logits are divided by the root of the head's width, here 3C
    z = run(ours, torch.cat([x, anything, zero], -1))
    found = {
        "z = (x; y; 0)": (z, torch.cat([x, run(layer, x), zero], -1)),
        "Q": (ours.wq(inside) / scale, torch.cat([layer.mixer.wq(x), zero, zero], -1)),
        "K": (ours.wk(inside), torch.cat([layer.mixer.wk(x), zero, zero], -1)),
        "V": (ours.wv(inside), torch.cat([zero, zero, layer.mixer.wv(x)], -1)),
        "MLP": (ours.mlp(inside), torch.cat([zero, written, -a], -1)),
    }
    check_equal(found)


@torch.no_grad()
def simulating(
    layer: TransformerBlock, order: tuple[int, ...], *, one_head: bool = False
) -> RecurrentBlock:
    """Return the recurrent layer that simulates a Transformer layer without norms (appendix A).

    Args:
        layer: of width C.
        order: the indices of the blocks of C channels that are carry, live and scratch. Without
            live, the layer has twice the width, and its scratch block takes the output.
        one_head: use one head, as the proof does: values lie in scratch. Otherwise they lie beside
            the keys, in the same heads, and Wo moves them to scratch.
    """
    theirs, hidden = layer.mixer, layer.mlp.up.out_features
    C, r = layer.d_model, layer.residual_scale
    carry, *live, scratch = (slice(C * i, C * (i + 1)) for i in order)
    width = C * len(order)
    config = RecurrentBlockConfig(
        head_dim=width if one_head else layer.config.head_dim,
        hidden=hidden + 2 * C * len(order[1:]),
        residual_scale=r,
        **BARE,  # type: ignore[arg-type]
    )
    ours = config.build(width).to(theirs.wq.weight)
    for parameter in ours.parameters():
        parameter.zero_()
    values = scratch if one_head else carry
    ours.wq.weight[carry, carry] = theirs.wq.weight * math.sqrt(len(order) if one_head else 1)
    ours.wk.weight[carry, carry] = theirs.wk.weight
    ours.wv.weight[values, carry] = theirs.wv.weight
    ours.wo.weight[scratch, values] = theirs.wo.weight
    up, down = ours.mlp.up.weight, ours.mlp.down.weight
    # MLP(x + a): x is in carry, and attention has added a to scratch, which was 0.
    up[:hidden, carry] = up[:hidden, scratch] = layer.mlp.up.weight
    down[(live or [scratch])[0], :hidden] = layer.mlp.down.weight
    # The linear part of the proof's MLP, by gelu(u) - gelu(-u) = u. The layer multiplies it by r.
    written = [(scratch, [(carry, 1)])]
    if live:
        written = [
            (live[0], [(carry, 1), (scratch, 1), (live[0], -1)]),
            (scratch, [(scratch, -1)]),
        ]
    eye = torch.eye(C, dtype=up.dtype)
    for i, (target, sources) in enumerate(written):
        for place, sign in ((2 * i, 1), (2 * i + 1, -1)):
            units = slice(hidden + C * place, hidden + C * (place + 1))
            for source, factor in sources:
                up[units, source] = sign * factor * eye
            down[target, units] = sign * eye / r
    return ours


def test_rnn_form():
    """Compare layers whose attention sees only the token before with the recurrence of z.

    A part of the width holds the place of a token, one channel for each. Queries ask for the place
    before their own, and their norm has a large weight, so that nothing else counts. Neither V nor
    the MLP writes there. So "V = I" is the identity on the rest.
    """
    content, width = C, C + T
    (x,) = random_inputs(content)
    x = torch.cat([x, torch.eye(T, dtype=x.dtype)], -1)
    found = {}
    for name, identity in {"V": False, "V = I": True}.items():
        block = random_weights(RecurrentBlockConfig(width, alibi=None), width)
        with torch.no_grad():
            for matrix in (block.wq, block.wk):
                matrix.weight.zero_()
            block.wq.weight[content:, content:] = torch.eye(T, dtype=x.dtype).roll(-1, 0).triu()
            block.wk.weight[content:, content:] = torch.eye(T, dtype=x.dtype)
            block.q_norm.get_parameter("weight").fill_(60)
            block.wo.weight.copy_(torch.eye(width))
            block.mlp.down.weight[content:] = 0
            block.wv.weight[content:] = 0
            if identity:
                block.wv.weight[:content] = torch.eye(content, width)
        z = run(block, x)

        def rms(y: Tensor) -> Tensor:
            return y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5)

        before = rms(z[:-1]) @ block.wv.weight.T
        inner = x[1:] + before
        found[f"z with {name}"] = (z[1:], inner + block.mlp(rms(inner)))
    check_equal(found)


def test_stability_setup():
    """Compare the theorem's layer with ours: zero queries, no MLP, no norms, r = alpha."""
    V, (x,) = random_value(), random_inputs(C)
    z = list[Tensor]()
    for k, token in enumerate(x, 1):
        z.append(token + ALPHA / k * V @ (token + sum(z, torch.zeros_like(token))))
    ours = run(uniform(RecurrentBlockConfig, ALPHA, V), x)
    check_equal({"z": (ours, torch.stack(z))})


def test_stability_gradient():
    """Compare the layer's gradients, by autograd, with the theorem's three forms."""
    V, (x,) = random_value(), random_inputs(C)
    gradients = first_gradients(uniform(RecurrentBlockConfig, ALPHA, V), x, range(2, T + 1))
    aV, eye = ALPHA * V, torch.eye(C, dtype=V.dtype)
    stirling, places, hops = list[Tensor](), list[Tensor](), list[Tensor]()
    for k in range(2, T + 1):
        terms = [n * torch.linalg.matrix_power(aV, r) for r, n in enumerate(cycle_counts(k))]
        stirling.append(torch.stack(terms).sum(0) / math.factorial(k))
        rising = torch.linalg.multi_dot([aV + m * eye for m in range(k)])
        places.append(rising / math.factorial(k))
        paths = [eye, *(eye + aV / m for m in range(1, k))]
        hops.append(aV / k @ torch.linalg.multi_dot(paths))
    forms = {"Stirling numbers": stirling, "rising product": places, "product of hops": hops}
    found = {name: (gradients, torch.stack(form)) for name, form in forms.items()}
    check_equal(found)


def cycle_counts(k: int) -> list[int]:
    """Count the permutations of k elements with 0, 1, ... k cycles: unsigned Stirling numbers."""
    counts = [1]
    for placed in range(k):  # a new element starts a cycle, or follows one of those placed before
        more = zip([0, *counts], [*counts, 0], strict=True)
        counts = [alone + placed * after for alone, after in more]
    return counts


def test_stability_direct_term():
    """Compare a Transformer layer's gradients, by autograd, with the theorem's term of one hop."""
    V, (x,) = random_value(), random_inputs(C)
    gradients = first_gradients(uniform(TransformerBlockConfig, ALPHA, V), x, range(2, T + 1))
    right = torch.stack([ALPHA / k * V for k in range(2, T + 1)])
    check_equal({"one hop": (gradients, right)})


def test_stability_condition():
    """The norm of d z_k / d x_1 grows with k only if alpha is above 1.

    V is orthonormal and symmetric, with eigenvalues 1 and -1: the largest that it may have.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(C, C, generator=generator, dtype=torch.float64))[0]
    V = q @ torch.diag(torch.tensor([1.0, -1.0] * (C // 2), dtype=torch.float64)) @ q.T
    lengths = [2**i for i in range(1, 5)]
    x = torch.zeros(lengths[-1], C, dtype=torch.float64)

    def factors(alpha: float) -> list[float]:
        gradients = first_gradients(uniform(RecurrentBlockConfig, alpha, V), x, lengths)
        return torch.linalg.matrix_norm(gradients, 2).tolist()

    assert max(factors(0.99)) <= 1
    assert factors(1.5) == sorted(factors(1.5))
    assert factors(1.5)[-1] > 1


def first_gradients(block: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return d z_k / d x_1 by autograd for each k of `lengths`, (len(lengths), C, C)."""
    rest, places = x[1:], torch.tensor(lengths) - 1

    def outputs(first: Tensor) -> Tensor:
        return run(block, torch.cat([first[None], rest]))[places]

    return jacobian(outputs, x[0])


Config = type[RecurrentBlockConfig] | type[TransformerBlockConfig]


def uniform(config: Config, alpha: float, value: Tensor) -> RecurrentBlock | TransformerBlock:
    """Return a layer that averages over the past, as the stability theorem has it."""
    width = len(value)
    block = config(width, residual_scale=alpha, **BARE).build(width).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        attention: Any = block.mixer if isinstance(block, TransformerBlock) else block
        attention.wv.weight.copy_(value)
        attention.wo.weight.copy_(torch.eye(width))
    return block


def run(block: nn.Module, x: Tensor) -> Tensor:
    """Run a layer on one sequence, (T, C) to (T, C)."""
    return block(x[None])[0][0]


def random_inputs(*widths: int) -> Iterator[Tensor]:
    """Yield T random tokens of each width."""
    generator = torch.Generator().manual_seed(1)
    for width in widths:
        yield torch.randn(T, width, generator=generator, dtype=torch.float64)


def random_value() -> Tensor:
    """Return a value matrix of moderate size."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(C, C, generator=generator, dtype=torch.float64) / math.sqrt(C)


def random_weights(config: Any, width: int, seed: int = 0) -> Any:
    """Build a layer in float64 with random matrices, large enough that every part counts."""
    generator = torch.Generator().manual_seed(seed)
    block = config.build(width).double()
    for matrix in block.parameters():
        if matrix.ndim == 2:
            nn.init.normal_(matrix, std=1.5 * matrix.shape[1] ** -0.5, generator=generator)
    return block
