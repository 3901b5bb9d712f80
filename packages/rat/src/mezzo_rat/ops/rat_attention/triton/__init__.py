"""RAT attention on a GPU. This file imports nothing, so Triton is loaded by the first launch.

`plan` says where the chunks of a call lie. `forward`, `backward` and `step` launch the kernels in
`scan` (the recurrence), `ends` (attention), `gates` and `rope`; `tiles` has their constants.
"""
