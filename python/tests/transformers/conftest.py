"""Tests of models know the attention "longspan"."""

import longspan.transformers
import torch

longspan.transformers.register()

# Models are tiny: threads would wait for each other, for minutes on a busy machine.
torch.set_num_threads(1)
