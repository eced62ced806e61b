"""Dropout on attention weights is refused; the message names the field of the config that asks for it."""

from __future__ import annotations

import torch

#: What configs call it, the most telling name first.
_FIELDS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "attn_dropout_rate",
    "attention_dropout_prob",
    "attention_dropout_rate",
    "attention_dropout_p",
    "dropout_rate",
    "dropout",
)


def refuse(module: torch.nn.Module, dropout: float) -> None:
    """An error for any dropout but 0."""
    if dropout:
        raise NotImplementedError(
            f"a dropout of {dropout} on attention weights, expected 0: set {field(module, dropout)} = 0 before the "
            "model is made, or evaluate with model.eval()"
        )


def field(module: torch.nn.Module, dropout: float) -> str:
    """The field of the module's config that holds this dropout."""
    config = getattr(module, "config", None)
    others = sorted(name for name in vars(config) if "drop" in name) if config is not None else []
    for name in (*_FIELDS, *others):
        if getattr(config, name, None) == dropout:
            return f"config.{name}"
    return f"the dropout of {type(module).__name__}"
