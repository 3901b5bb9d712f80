"""The out-of-memory cells of Table 8, predicted from the bytes of our states."""

import torch
from mezzo_core.papers import Claim, Finding, Measurement, ResultRow, Status, Table

from mezzo_rat.reproduction.gpu.shapes import paper_layers

C, HEAD_DIM = 2048, 128
GPU_BYTES = 120e9
LAYERS = paper_layers(HEAD_DIM)


def out_of_memory(claim: Claim, table8: Table) -> Finding:
    """Compare each cell of Table 8 with whether the batch's state fits the paper's GPU.

    Nothing is allocated: the sizes come from `state_bytes`, which other checks compare with real
    tensors.
    """
    rows, agreed = [], 0
    for row in table8.rows:
        batch = int(row.group.removeprefix("B="))
        with torch.device("meta"):
            mixer = LAYERS[row.model].build(C).bfloat16()
        sizes = [batch * mixer.state_bytes(int(column)) for column in table8.columns]
        printed = [value == "OOM" for value in row.values]
        agreed += sum((size > GPU_BYTES) == oom for size, oom in zip(sizes, printed, strict=True))
        rows.append(ResultRow(row.model, (tuple(size / 1e9 for size in sizes),), row.group))
    cells = len(table8.rows) * len(table8.columns)
    return Finding(
        claim.id,
        "claim",
        Status.SCALED_DOWN,
        f"computed, not run: in {agreed} of {cells} cells of Table 8 our state's size, above or "
        "below the GPU's 120 GB, tells whether the paper ran out of memory",
        (
            Measurement(
                table8.columns,
                tuple(rows),
                f"state of one layer after T tokens, C = {C}, bfloat16, whole batch",
                unit="GB",
            ),
        ),
    )
