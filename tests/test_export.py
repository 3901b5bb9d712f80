"""torch.export takes models of all packages, for texts of any length."""

import pytest
import torch
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_drt import DRTConfig
from mezzo_gsa import GLAConfig, GSAConfig, MambaConfig
from mezzo_rat import RATConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig
from torch.export import Dim, export

ANY = Dim("tokens", min=2, max=512)
EIGHTS = 8 * Dim("chunks", min=2, max=64)
MODELS = {
    "attention": ({"mixers": (AttentionConfig(head_dim=8, window_size=5),) * 2}, ANY),
    "gsa": ({"mixers": (GSAConfig(num_heads=2, num_slots=4),)}, ANY),
    "gla": ({"mixers": (GLAConfig(num_heads=2),)}, ANY),
    "mamba": ({"mixers": (MambaConfig(),)}, ANY),
    "rat": ({"mixers": (RATConfig(chunk_size=4, head_dim=8),)}, EIGHTS),
    "drt": (
        {"stack": DRTConfig(2, num_groups=1, chunk_size=8, window_size=16, head_dim=8)}, EIGHTS
    ),
    "recurrent": ({"stack": RecurrentStackConfig(2, RecurrentBlockConfig(head_dim=8))}, ANY),
}  # fmt: skip


class Logits(torch.nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, tokens):
        return self.lm(tokens).logits


@pytest.mark.any_shapes
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_is_exported_for_texts_of_any_length(name):
    """Models with chunks for any number of whole chunks."""
    options, length = MODELS[name]
    torch.manual_seed(0)
    model = Logits(LMConfig(17, 16, **options).build().eval())
    texts = {T: torch.randint(17, (2, T)) for T in ((24, 56) if length is EIGHTS else (24, 2, 57))}
    program = export(model, (texts[24],), dynamic_shapes=({1: length},)).module()
    for tokens in texts.values():
        torch.testing.assert_close(program(tokens), model(tokens))
