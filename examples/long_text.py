"""A long text on one GPU: DRT reads it in segments, its chunks lie in the host's memory.

The sizes are tiny, so that it runs anywhere. With NUM_TOKENS = 2**24 the host's memory grows, and
the GPU's hardly: it keeps a vector for each chunk. The last lines tell both.
"""

import torch
from mezzo_core.nn import LMConfig, generate
from mezzo_drt import DRTConfig

NUM_TOKENS, SEGMENT = 4096, 512

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
stack = DRTConfig(
    4, num_groups=2, chunk_size=32, num_retrieved=4, window_size=64, head_dim=16, offload=True
)
model = LMConfig(vocab_size=257, d_model=32, stack=stack).build().to(device).eval()
text = torch.randint(256, (1, NUM_TOKENS))

state = model.init_state(batch=1)
with torch.inference_mode():
    for segment in text.split(SEGMENT, dim=1):
        logits, state = model(segment.to(device), state, last_only=True)
print("the next token after the text:", int(logits.argmax()))

# `generate` does the same for a prompt, and goes on.
print(generate(model, text.tolist(), max_new_tokens=4, prefill_tokens=SEGMENT)[0])
for n in (4096, 2**24):
    on_gpu, on_host = model.state_bytes(n), model.host_state_bytes(n)
    print(
        f"{n:,} tokens: {on_gpu / 1e6:,.1f} MB on the device, {on_host / 1e6:,.1f} MB on the host"
    )
