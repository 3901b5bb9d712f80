"""The two sets of parts of the tiled algorithm: PyTorch's operations, or Triton kernels."""

from types import ModuleType

from mezzo_recurrent_transformer.ops.recurrent_layers import eager


def parts_of(impl: str) -> ModuleType:
    """Return the module with the parts for an `impl`, "eager" or "triton"."""
    if impl == "eager":
        return eager
    from mezzo_recurrent_transformer.ops.recurrent_layers import triton

    return triton
