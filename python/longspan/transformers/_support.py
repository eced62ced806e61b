"""Models that can't use this attention, or would ignore a pattern, are refused.

transformers checks whether a model has SDPA or FlashAttention, and has no such check for names that users register: a
model that computes its attention itself takes the name and goes on as before, or fails on the mask. So ``register``
extends three methods of ``PreTrainedModel``: ``get_correct_attn_implementation``, which checks names when a model is
made, ``post_init``, which ends every model's ``__init__``, and ``set_attn_implementation``. Nothing changes for models
that use other names.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from longspan.transformers import _bias, _pattern

#: The pattern that each registered name has.
patterns: dict[str, _pattern.Registered | None] = {}


def extend() -> None:
    """Adds the checks, once."""
    if PreTrainedModel.post_init.__module__ != __name__:
        PreTrainedModel.get_correct_attn_implementation = _checked_name(PreTrainedModel.get_correct_attn_implementation)
        PreTrainedModel.set_attn_implementation = _checked_set(PreTrainedModel.set_attn_implementation)
        PreTrainedModel.post_init = _checked_init(PreTrainedModel.post_init)


def _checked_name(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **options: Any) -> str:
        name = original(self, *args, **options)
        check_class(self, name)
        return name

    return get_correct_attn_implementation


def _checked_init(original: Callable) -> Callable:
    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        registered = patterns.get(self.config._attn_implementation)
        if registered is not None:
            check_layers(self, registered)
        _remember(self, name_in_use)
        _bias.prepare(self, name_in_use, patterns)

    post_init.__module__ = __name__
    return post_init


def _checked_set(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_attn_implementation(self: PreTrainedModel, attn_implementation: str | dict, *args: Any, **options: Any):
        requested = dict(_requested(self.config, attn_implementation))

        def name_of(module: torch.nn.Module) -> str | None:
            return requested.get(id(getattr(module, "config", None)), requested[id(self.config)])

        for module in self.modules():
            _check_change(module, name_of(module))
        _remember(self, name_of)
        _bias.prepare(self, name_of, patterns)
        original(self, attn_implementation, *args, **options)

    return set_attn_implementation


def _requested(config: Any, implementation: str | dict) -> Iterator[tuple[int, str]]:
    """The name that each config is about to have, by the rules of ``set_attn_implementation``."""
    named = not isinstance(implementation, dict)
    yield id(config), implementation if named else implementation.get("", config._attn_implementation)
    for key in config.sub_configs:
        inner = getattr(config, key)
        if inner is not None:
            name = implementation if named else implementation.get(key, inner._attn_implementation)
            yield from _requested(inner, name)


def _check_change(module: torch.nn.Module, name: str) -> None:
    """An error where a layer or a model would ignore its pattern under another name."""
    if name not in patterns and hasattr(module, _pattern.ATTRIBUTE):
        raise ValueError(
            f'{type(module).__name__} has a pattern, which attn_implementation="{name}" would ignore: call '
            "longspan.transformers.set_pattern(model, None) first"
        )
    # Without a pattern transformers warns, and the model goes on as before.
    if isinstance(module, PreTrainedModel) and patterns.get(name) is not None:
        check_class(module, name)
        check_layers(module, patterns[name])


def check_class(model: PreTrainedModel, name: str) -> None:
    """An error for a model that can't use ``name``, if that is one of ours."""
    if name not in patterns:
        return
    if any(_ignores_names(kind) for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)):
        ignored = "" if patterns[name] is None else f" and would ignore the pattern {patterns[name]}"
        raise ValueError(
            f'{type(model).__name__} computes its attention itself{ignored}, so attn_implementation="{name}" is not '
            'supported: use "eager", or leave it out. A model of several parts takes a dict, such as '
            f'{{"text_config": "{name}", "vision_config": "eager"}}'
        )


def _remember(model: PreTrainedModel, name_of: Callable[[torch.nn.Module], str | None]) -> None:
    """Resolves patterns for the layers of a model, so that what a layer can't have is found now."""
    if not any(patterns.values()):
        return
    for module in model.modules():
        registered = patterns.get(name_of(module))
        if registered is not None and calls_interface(type(module)) and not hasattr(module, _pattern.ATTRIBUTE):
            _pattern.remember(module, registered)


def name_in_use(module: torch.nn.Module) -> str | None:
    """The ``attn_implementation`` of a layer or a model."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def check_layers(model: torch.nn.Module, pattern: object) -> None:
    """An error for layers that would ignore a pattern, and for a model without one that takes it."""
    for path, module in model.named_modules():
        if computes_itself(type(module)):
            raise ValueError(
                f"{type(module).__name__} ({path}) computes its attention itself and would ignore the pattern "
                f"{pattern}: use longspan.transformers.set_pattern on the other parts of the model"
            )
    if not any(calls_interface(type(module)) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no layer that calls the attention which is registered, and would ignore the "
            f"pattern {pattern}: expected a model of transformers that uses AttentionInterface"
        )


@functools.cache
def _ignores_names(kind: type[PreTrainedModel]) -> bool:
    """Whether a model computes its attention itself, by the test of its module's source that transformers has too. A
    class that was typed into a notebook has no source."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return False
    layers = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return layers is not None and "ALL_ATTENTION_FUNCTIONS" not in source


@functools.cache
def calls_interface(kind: type) -> bool:
    """Whether layers of a class call the attention that is registered."""
    return "ALL_ATTENTION_FUNCTIONS" in _names_used(kind)


@functools.cache
def computes_itself(kind: type) -> bool:
    """Whether layers of a class are attention, but not the one that is registered."""
    if issubclass(kind, torch.nn.MultiheadAttention):
        return True
    if ("Attention" not in kind.__name__ and "Attn" not in kind.__name__) or calls_interface(kind):
        return False
    return not _names_used(kind).isdisjoint(("softmax", "Softmax", "scaled_dot_product_attention"))


def _names_used(kind: type) -> set[str]:
    """The names that occur in the class that a layer has its ``forward`` from, which may call other methods of it."""
    owner = next((base for base in kind.__mro__ if "forward" in vars(base)), kind)
    names: set[str] = set()
    for method in vars(owner).values():
        code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
        if code is not None:
            names.update(code.co_names)
    return names
