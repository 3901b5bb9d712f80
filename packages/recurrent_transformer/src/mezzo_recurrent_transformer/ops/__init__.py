"""The ops of the Recurrent Transformer: functions on tensors, weights included."""

from mezzo_recurrent_transformer.ops.recurrent_layers import LayerWeights as LayerWeights
from mezzo_recurrent_transformer.ops.recurrent_layers import Past as Past
from mezzo_recurrent_transformer.ops.recurrent_layers import recurrent_layers as recurrent_layers
