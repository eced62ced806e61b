"""Which models can hold a part of a sequence, and which calls of them are refused.

Attention is what brings ranks' tokens together. A model with anything else that looks at other tokens (a convolution,
a state, a pooled token, a rotary base that follows the length) would compute it from its own tokens alone, and no
attention could know. So families are named here: those of which ``test_ring_models.py`` compares outputs and gradients
with one process. And the first thing that looks at a call is ``check_call``, before the model runs.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

#: ``config.model_type`` of families that hand position ids to their layers, and mix tokens by attention alone.
FAMILIES = frozenset(
    (
        *("apertus", "arcee", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4"),
        *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox"),
        *("gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "helium", "hunyuan_v1_dense", "jetmoe"),
        *("llama", "mimo_v2_flash", "minimax_m2", "ministral", "mistral", "mixtral", "modernbert-decoder", "nanochat"),
        *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "afmoe"),
    )
)

#: Models around a decoder whose outputs are one per token.
_PER_TOKEN = ("ForCausalLM", "LMHeadModel", "ForTokenClassification")

#: Rotary embeddings whose frequencies follow the largest position at hand, which isn't that of other ranks.
_BY_LENGTH = ("dynamic", "longrope")


def refused(name: str, what: str, expected: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what}: attn_implementation={name!r} is registered with a process group. Expected {expected}; without a "
        "group register another name"
    )


def check_config(name: str, module: torch.nn.Module) -> None:
    """An error for a model or a layer of a family that can't hold a part of a sequence."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise refused(
            name,
            f"{type(module).__name__} has model_type {family!r}, which isn't compared with one process",
            f"one of {', '.join(sorted(FAMILIES))}",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    inner = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in inner:
        if part.get("rope_type") in _BY_LENGTH:
            raise refused(
                name,
                f"{type(module).__name__} has rope_type {part['rope_type']!r}, which follows the largest position of a "
                "rank's own tokens",
                "another rope_type",
            )


def check_call(name: str, model: PreTrainedModel, given: dict[str, Any]) -> None:
    """An error for arguments that a rank's own tokens aren't enough for."""
    check_config(name, model)
    if model.base_model is not model and not type(model).__name__.endswith(_PER_TOKEN):
        raise refused(name, f"{type(model).__name__} pools tokens, of which others have some", "a model per token")
    if given.get("position_ids") is None:
        raise ValueError(
            f"position_ids are missing, and transformers would count this rank's tokens from 0: attn_implementation="
            f"{name!r} is registered with a process group. Pass position_ids=longspan.torch.Shards(…).positions[None]"
        )
    if given.get("labels") is not None:
        raise refused(
            name,
            "labels, which transformers would shift over this rank's tokens and average over them",
            "longspan.torch.ring_loss of the logits and of Shards.next_tokens, and no labels",
        )
    use = given.get("use_cache")
    use = getattr(model.config, "use_cache", False) if use is None else use
    # Where activations are checkpointed, transformers sets it to False.
    makes = use and not (model.training and model.is_gradient_checkpointing)
    if makes or given.get("past_key_values") is not None:
        raise refused_cache(name)


def refused_cache(name: str) -> NotImplementedError:
    what = "a KV cache, of which each rank would have its own tokens alone"
    return refused(name, what, "use_cache=False, or model.config.use_cache = False")
