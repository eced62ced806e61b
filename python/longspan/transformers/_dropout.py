"""Dropout on attention weights is refused; the message names the field of the config that asks for it."""

from __future__ import annotations

import torch


def refuse(module: torch.nn.Module, dropout: float) -> None:
    """An error for any dropout but 0."""
    if dropout:
        raise NotImplementedError(
            f"a dropout of {dropout} on attention weights, expected 0: set {_field(module, dropout)} = 0 before the "
            "model is made, or evaluate with model.eval()"
        )


def _field(module: torch.nn.Module, dropout: float) -> str:
    """The field of the module's config that holds this dropout: if several do, the one that is about attention
    (``attention_dropout``, ``attention_probs_dropout_prob``, ``attn_pdrop``)."""
    fields = vars(getattr(module, "config", torch.nn.Module()))
    names = [name for name, value in fields.items() if "drop" in name and value == dropout]
    names.sort(key=lambda name: not name.startswith("att"))
    return f"config.{names[0]}" if names else f"the dropout of {type(module).__name__}"
