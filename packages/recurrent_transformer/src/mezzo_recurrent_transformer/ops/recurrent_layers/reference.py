"""The definition of recurrent layers: a plain loop over tokens (section "Architecture")."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights, Past


def normalize(x: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    """Normalize the last axis."""
    if form.norm == "none":
        return x
    normalization = F.layer_norm if form.norm == "layer" else F.rms_norm
    return normalization(x, x.shape[-1:], weight, eps=form.eps)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, in the dtype of the weight."""
    return x.to(weight.dtype) @ weight.mT


def recurrent_layer_reference(
    x: Tensor, weights: LayerWeights, form: Form, slopes: Tensor, past: Past | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one layer token by token, with gradients by autograd.

        q[i], kt[i], vt[i] = norm(Wq n1(x[i])), norm(Wk n1(x[i])), Wv n1(x[i])
        a[i] = Wo softmax-attention of q[i] over the pairs (k[j], v[j]), j < i, and (kt[i], vt[i])
        h[i] = x[i] + r a[i];   z[i] = h[i] + r MLP(n2(h[i]))
        k[i], v[i] = norm(Wk n1(z[i])), Wv n1(z[i])

    Args:
        x: (B, T, C).
        weights: of one layer, without the axis n.
        form: the options. With `block_size` b, token i attends to the temporary pairs of all tokens
            of its own block up to i, and to the persistent pairs of the blocks before.
        slopes: (H,), ALiBi; zeros for none.
        past: of one layer, without the axis n; for `block_size` 1.

    Returns:
        z (B, T, C), and the persistent k and v of these tokens (B, T, H, D).
    """
    (B, T, C), w, r = x.shape, weights, form.residual_scale
    heads = (form.num_heads, C // form.num_heads)

    def make_pair(n: Tensor) -> tuple[Tensor, Tensor]:
        k, v = normalize(project(n, w.wk), w.k_norm, form), project(n, w.wv)
        return k.unflatten(-1, heads), v.unflatten(-1, heads)

    n1 = normalize(x, w.n1, form)
    q = normalize(project(n1, w.wq), w.q_norm, form).unflatten(-1, heads)
    kt, vt = make_pair(n1)
    if past is None:
        past = Past(kt[:, :0], vt[:, :0], torch.zeros(B, dtype=torch.int64, device=x.device))
    seen, slots = past.lengths[:, None], torch.arange(past.k.shape[1], device=x.device)
    unused = (slots >= seen)[..., None, None]  # they may hold anything, NaN too
    old_k, old_v = (old.to(kt.dtype).masked_fill(unused, 0) for old in (past.k, past.v))
    z: list[Tensor] = []
    k: list[Tensor] = []
    v: list[Tensor] = []
    for t in range(T):
        first = t - t % form.block_size  # of its block
        keys = torch.cat([old_k, *k[:first], kt[:, first : t + 1]], 1)
        values = torch.cat([old_v, *v[:first], vt[:, first : t + 1]], 1)
        here = torch.arange(t + 1, device=x.device).expand(B, -1)
        distance = torch.cat([seen + t - slots, t - here], 1)
        visible = torch.cat([slots < seen, here >= 0], 1)
        logits = torch.einsum("bhd,bshd->bhs", q[:, t], keys) * heads[1] ** -0.5
        logits = logits - slopes.to(logits.dtype)[:, None] * distance[:, None].to(logits.dtype)
        weight = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("bhs,bshd->bhd", weight, values).flatten(1)
        h = x[:, t] + r * project(attended, w.wo)
        mlp = project(F.gelu(project(normalize(h, w.n2, form), w.up)), w.down)
        z.append((h + r * mlp).to(x.dtype))
        n = normalize(z[-1], w.n1, form.of_pairs())
        for pairs, new in zip((k, v), make_pair(n), strict=True):
            pairs.append(new[:, None])
    if T == 0:
        return x, kt, vt
    return torch.stack(z, 1), torch.cat(k, 1), torch.cat(v, 1)


def recurrent_layers_reference(
    x: Tensor, weights: LayerWeights, form: Form, slopes: Tensor, past: Past | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Run n layers one after another; return z, and with a past its k and v with T slots more."""
    grown: list[list[Tensor]] = [[], []]
    for i in range(len(weights.wq)):
        its = None if past is None else Past(past.k[i], past.v[i], past.lengths)
        x, *pair = recurrent_layer_reference(x, weights.of_layer(i), form, slopes, its)
        if its is not None:
            slot = its.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
            for all_layers, old, new in zip(grown, (its.k, its.v), pair, strict=True):
                room = torch.cat([old.to(new.dtype), torch.zeros_like(new)], 1)
                all_layers.append(room.scatter(1, slot[..., None, None].expand_as(new), new))
    return x, None if past is None else (torch.stack(grown[0]), torch.stack(grown[1]))
