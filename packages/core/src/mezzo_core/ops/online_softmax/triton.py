"""Online softmax in kernels; scores and log-sum-exps are in base 2."""

import triton
import triton.language as tl


@triton.jit
def add_scores(b_acc, b_m, b_l, b_s, scale2):
    """Add a tile of scores to the softmax of BM queries.

    The caller then adds the product of the weights and the tile's values to `b_acc`.

    Args:
        b_acc: (BM, V) sum of weighted values so far.
        b_m: (BM,) largest scaled score so far, at first -inf. Each query must have a finite score,
            here or in the tile.
        b_l: (BM,) sum of weights so far.
        b_s: (BM, BN) scores; -inf hides a key.
        scale2: positive factor of the scores. It is applied after the maximum, so it costs no
            multiplication of its own.

    Returns:
        The weights (BM, BN) of the tile, then `b_acc`, `b_m` and `b_l` with the tile counted.
    """
    b_new = tl.maximum(b_m, tl.max(b_s, 1) * scale2)
    b_p = tl.exp2(b_s * scale2 - b_new[:, None])
    b_shrink = tl.exp2(b_m - b_new)
    return b_p, b_acc * b_shrink[:, None], b_new, b_l * b_shrink + tl.sum(b_p, 1)


@triton.jit
def merge(b_outs, b_lses):
    """Merge the outputs (N, V) of N parts by their log-sum-exps (N,).

    Returns out (V,) and its log-sum-exp; 0 and -inf if all parts are empty (-inf).
    """
    b_top = tl.max(b_lses, 0)
    empty = b_top == float("-inf")
    b_top = tl.where(empty, 0.0, b_top)
    b_w = tl.exp2(b_lses - b_top)
    b_sum = tl.where(empty, 1.0, tl.sum(b_w, 0))
    lse = tl.where(empty, float("-inf"), b_top + tl.log2(b_sum))
    return tl.sum((b_w / b_sum)[:, None] * b_outs, 0), lse
