"""All layers of a Recurrent Transformer as one differentiable op."""

from mezzo_recurrent_transformer.ops.recurrent_layers.api import RecurrentOutput as RecurrentOutput
from mezzo_recurrent_transformer.ops.recurrent_layers.api import (
    recurrent_layers as recurrent_layers,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form as Form
from mezzo_recurrent_transformer.ops.recurrent_layers.form import LayerWeights as LayerWeights
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Norm as Norm
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Past as Past
