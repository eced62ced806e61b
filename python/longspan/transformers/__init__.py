"""Attention for the models of transformers, on the CPU.

>>> import longspan.transformers
>>> longspan.transformers.register()
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> config = LlamaConfig(
...     vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="longspan",
... )
>>> LlamaForCausalLM(config).config._attn_implementation
'longspan'

A model that exists already changes over with ``model.set_attn_implementation("longspan")``.

transformers says which queries attend to which keys with a function over positions, and other attentions evaluate it
for every pair. Here it is recognised for what it is (causal, a window, packed sequences) and becomes a
pattern: no mask of tokens by tokens exists. What isn't recognised is an error, never an
approximation.

A pattern of one's own is intersected with the model's mask: ``register(pattern=…)`` for all models that use a name,
``set_pattern`` for one model.
"""

from longspan.transformers._register import register, set_pattern

__all__ = ["register", "set_pattern"]
