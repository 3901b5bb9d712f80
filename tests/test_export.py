"""torch.export takes models of all packages, and so does torch.onnx.export."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.ops.scan import doubling
from mezzo_drt import DRTConfig
from mezzo_drt.baselines import BlockRecurrentConfig, LandmarkConfig
from mezzo_gsa import GLAConfig, GSAConfig, MambaConfig
from mezzo_rat import RATConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig
from torch.export import Dim, export

ANY = Dim("tokens", min=2)
EIGHTS = 8 * Dim("chunks", min=2)
ONE = None
"""The exported length alone."""
ONE_LAYER = DRTConfig(
    2, num_groups=1, chunk_size=4, window_size=8, head_dim=8, num_encoder_layers=1
)
MODELS = {
    "attention": ({"mixers": (AttentionConfig(head_dim=8, window_size=5),) * 2}, ANY),
    "gsa": ({"mixers": (GSAConfig(num_heads=2, num_slots=4),)}, ANY),
    "gla": ({"mixers": (GLAConfig(num_heads=2),)}, ANY),
    "mamba": ({"mixers": (MambaConfig(),)}, ANY),
    "rat": ({"mixers": (RATConfig(chunk_size=4, head_dim=8),)}, EIGHTS),
    "drt": ({"stack": ONE_LAYER}, EIGHTS),
    "recurrent": ({"stack": RecurrentStackConfig(2, RecurrentBlockConfig(head_dim=8))}, ANY),
    "landmark": ({"stack": LandmarkConfig(num_layers=1, head_dim=8, chunk_size=4)}, ONE),
    "block-recurrent": (
        {"mixers": (BlockRecurrentConfig(head_dim=8, num_states=2, block_size=8, window_size=8),)},
        ONE,
    ),
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
def test_a_model_is_exported_for_any_number_of_texts_of_any_length(name):
    """Models with chunks for any number of whole chunks, DRT's baselines for one length."""
    options, length = MODELS[name]
    torch.manual_seed(0)
    model = Logits(LMConfig(17, 16, **options).build().eval())
    lengths = {EIGHTS: (24, 56), ANY: (24, 2, 57), ONE: (24, 24)}[length]
    texts = [torch.randint(17, (2 + i, T)) for i, T in enumerate(lengths)]
    sizes = {0: Dim("texts", min=1, max=64), 1: length}
    program = export(model, (texts[0],), dynamic_shapes=(sizes,)).module()
    for tokens in texts:
        torch.testing.assert_close(program(tokens), model(tokens))


FOURS = 4 * Dim("chunks", min=2)
WITH_RAT = replace(ONE_LAYER, lower=(RATConfig(chunk_size=4, head_dim=8),))
OF_ANY_LENGTH = {
    "mixers": ({"mixers": (AttentionConfig(head_dim=8, window_size=5), MambaConfig())}, ANY, 15),
    "drt and rat": ({"stack": WITH_RAT}, FOURS, 40),
}
OF_ONE_LENGTH = {
    "gsa": {"mixers": (GSAConfig(2, num_slots=4),)},
    "recurrent": {"stack": RecurrentStackConfig(1, RecurrentBlockConfig(head_dim=8))},
}


@torch.no_grad()
def check_onnx(options, folder, lengths, dynamic_shapes=None):
    """ONNX Runtime computes what PyTorch does."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    model = Logits(LMConfig(17, 16, **options, init_std=0.3).build().eval())
    texts = [torch.randint(17, (2, T)) for T in lengths]
    program = torch.onnx.export(
        model,
        (texts[0],),
        dynamo=True,
        dynamic_shapes=dynamic_shapes,
        verbose=False,
        optimize=False,
    )
    program.save(folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    for tokens in texts:
        (found,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.any_shapes
@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_a_model_is_written_as_onnx_for_texts_of_any_length(name, tmp_path, monkeypatch):
    """Models with chunks for any number of whole chunks."""
    options, length, another = OF_ANY_LENGTH[name]
    monkeypatch.setattr(doubling, "_LONGEST", 16)  # not 31 steps of a scan, but 4
    check_onnx(options, tmp_path, (8, another), ({1: length},))


@pytest.mark.any_shapes
@pytest.mark.parametrize("name", OF_ONE_LENGTH)
def test_a_model_whose_loop_is_written_down_is_for_texts_of_one_length(name, tmp_path):
    check_onnx(OF_ONE_LENGTH[name], tmp_path, (4,))
