"""The gated scan on a GPU: bound by reading z, v, g and writing the output.

A program owns BD channels (one warp, 8 bytes a lane) of a span of tokens and walks through time,
the state in registers. It loads BT tokens before it uses the first, so that many loads are under
way, and then steps through them. When rows and channels alone give too few programs, time is split
(`spans`): a first pass finds what each span does to a state (multiplies it by the product of its
gates, adds its own end), a small one chains the spans, and the main pass (`forward`, `backward`)
starts each span from its true state. `tokens` has what all kernels share, `inputs` what they are
given.

The backward keeps no h. It has the float32 states of every EVERY-th token, scans forward between
two of them in registers, and then walks back. Nothing is added atomically: repeats are bit-equal.

Packed sequences lie in the one row: at a token that opens sequence s the state becomes h0[s]; at
one that closes it the gradient of the state becomes dfinal[s].

This file imports nothing, so Triton is loaded by the first launch.
"""
