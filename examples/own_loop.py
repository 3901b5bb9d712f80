"""A training loop of your own: a hybrid of RAT and windowed attention learns to count in sevens."""

import torch
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig, generate
from mezzo_rat import RATConfig

torch.manual_seed(0)
window = AttentionConfig(head_dim=16, window_size=8)
mixers = (RATConfig(chunk_size=4, head_dim=16), window)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LMConfig(vocab_size=50, d_model=32, mixers=mixers, mlp=MLPConfig()).build().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(60):
    start = torch.randint(50, (16, 1), device=device)
    rows = (start + 7 * torch.arange(17, device=device)) % 50  # (B, T + 1)
    loss = model.loss(rows[:, :-1], rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 59:
        print(f"step {step}: loss {loss.item():.3f}")

print("3, 10, 17 ...", generate(model, [[3, 10, 17]], max_new_tokens=5)[0])
