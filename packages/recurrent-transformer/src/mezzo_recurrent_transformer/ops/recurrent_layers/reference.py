"""The definition of a recurrent layer: a plain loop over tokens (section "Architecture")."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights, Norm


def normalize(x: Tensor, weight: Tensor | None, norm: Norm, eps: float) -> Tensor:
    """Normalize the last axis."""
    if norm == "none":
        return x
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, eps=eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps=eps)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, in the dtype of the weight."""
    return x.to(weight.dtype) @ weight.mT


def recurrent_layer_reference(
    x: Tensor,
    weights: LayerWeights,
    form: Form,
    slopes: Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None = None,
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
        past: k and v (B, S, H, D) of earlier tokens, and their numbers (B,), for `block_size` 1.

    Returns:
        z (B, T, C), and the persistent k and v of these tokens (B, T, H, D).
    """
    B, T, C = x.shape
    H, b = form.num_heads, form.block_size
    w = weights
    heads = (H, C // H)
    n1 = normalize(x, w.n1, form.norm, form.eps)
    q = normalize(project(n1, w.wq), w.q_norm, form.norm, form.eps).unflatten(-1, heads)
    kt = normalize(project(n1, w.wk), w.k_norm, form.norm, form.eps).unflatten(-1, heads)
    vt = project(n1, w.wv).unflatten(-1, heads)
    old_k, old_v, seen = past or (kt[:, :0], vt[:, :0], torch.zeros(B, dtype=torch.int64))
    slots = torch.arange(old_k.shape[1], device=x.device)
    is_real = slots < seen[:, None].to(x.device)
    z: list[Tensor] = []
    k: list[Tensor] = []
    v: list[Tensor] = []
    for t in range(T):
        first = t - t % b  # the first token of its block
        keys = torch.cat([old_k, *k[:first], kt[:, first : t + 1]], 1)
        values = torch.cat([old_v, *v[:first], vt[:, first : t + 1]], 1)
        here = torch.arange(t + 1, device=x.device)
        distance = torch.cat([seen[:, None].to(x.device) + t - slots, (t - here).expand(B, -1)], 1)
        visible = torch.cat([is_real, torch.ones(B, t + 1, dtype=torch.bool, device=x.device)], 1)
        logits = torch.einsum("bhd,bshd->bhs", q[:, t], keys) * (C // H) ** -0.5
        logits = logits - slopes.to(logits.dtype)[:, None] * distance[:, None].to(logits.dtype)
        weight = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        attended = torch.einsum("bhs,bshd->bhd", weight, values).flatten(1)
        h = x[:, t] + form.residual_scale * project(attended, w.wo)
        mlp = project(F.gelu(project(normalize(h, w.n2, form.norm, form.eps), w.up)), w.down)
        z.append((h + form.residual_scale * mlp).to(x.dtype))
        n = normalize(z[-1], w.n1, form.norm, form.eps) if form.persistent_norm else z[-1]
        k.append(normalize(project(n, w.wk), w.k_norm, form.norm, form.eps).view(B, 1, *heads))
        v.append(project(n, w.wv).view(B, 1, *heads))
    if T == 0:
        return x, kt, vt
    return torch.stack(z, 1), torch.cat(k, 1), torch.cat(v, 1)


def recurrent_layers_reference(
    x: Tensor,
    weights: LayerWeights,
    form: Form,
    slopes: Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Run n layers one after another; return z, and with a past its k and v with T slots more."""
    if cu_seqlens is not None:
        sequences = x.split(cu_seqlens.diff().tolist(), 1)
        z = [recurrent_layers_reference(s, weights, form, slopes, None, None)[0] for s in sequences]
        return torch.cat(z, 1), None
    T = x.shape[1]
    grown: list[list[Tensor]] = [[], []]
    for i in range(len(weights.wq)):
        layer = weights.of_layer(i)
        its = None if past is None else (past[0][i], past[1][i], past[2])
        x, *pair = recurrent_layer_reference(x, layer, form, slopes, its)
        if its is not None:
            slot = (its[2][:, None] + torch.arange(T, device=x.device))[..., None, None]
            for all_layers, old, new in zip(grown, its[:2], pair, strict=True):
                room = torch.cat([old.to(new.dtype), torch.zeros_like(new)], 1)
                all_layers.append(room.scatter(1, slot.expand_as(new), new))
    return x, None if past is None else (torch.stack(grown[0]), torch.stack(grown[1]))
