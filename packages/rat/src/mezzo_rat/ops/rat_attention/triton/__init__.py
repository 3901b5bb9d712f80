"""RAT attention on a GPU. This file imports nothing, so that only the first launch loads Triton.

`plan` has the positions of a call's chunks. `forward`, `backward` and `step` launch the kernels of
`scan` (the recurrence), `ends` (attention), `gates` and `rope`; `tiles` has their constants.
"""
