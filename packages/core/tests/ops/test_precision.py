"""A CUDA graph keeps the settings of its capture, so graphs are kept by them."""

import pytest
import torch
from mezzo_core.ops.precision import SPLIT_K, product_settings

REDUCED = (True, False)
if hasattr(torch.backends.cuda.matmul, SPLIT_K[0]):
    REDUCED = (True, False, (False, False))  # the last one without split-K either


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("allow_tf32", (False, True)),
        ("allow_fp16_accumulation", (False, True)),
        ("allow_fp16_reduced_precision_reduction", REDUCED),
        ("allow_bf16_reduced_precision_reduction", REDUCED),
    ],
)
def test_each_setting_of_products_is_told(flag, values):
    products, found = torch.backends.cuda.matmul, set()
    usual = getattr(products, flag)
    try:
        for value in values:
            setattr(products, flag, value)
            found.add(product_settings())
    finally:
        setattr(products, flag, usual)
    assert len(found) == len(values)
