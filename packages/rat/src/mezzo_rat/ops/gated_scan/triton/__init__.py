"""The gated scan on a GPU: bound by reading z, v, g and writing the output.

A program owns BD channels (one warp, 8 bytes a lane) of a span of tokens. It walks through time and
holds the state in registers. It loads BT tokens before it uses the first of them, so that many
loads are in flight, and then steps through them.

When rows and channels give too few programs, time is split into spans (`spans`). A first pass finds
the effect of each span on a state: multiply by the product of its gates, then add the span's own
last state. A small kernel chains the spans. The main pass (`forward`, `backward`) then starts each
span from its true state. `tokens` has the functions that all kernels share, and `inputs` prepares
their tensors.

The forward does not save all h. It saves the float32 state before every EVERY-th token; between two
of them the backward scans forward again in registers, and then walks back. Nothing is added
atomically, so repeated runs are equal to the bit.

Packed sequences are all in one row. At the first token of sequence s the state becomes h0[s]. In
the backward, at the last token of s, the gradient of the state becomes dfinal[s].

This file imports nothing, so that only the first launch loads Triton.
"""
