"""Tests of models know the attention "longspan"."""

import longspan.transformers

longspan.transformers.register()
