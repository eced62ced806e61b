"""Families of models, as small ones with random weights, and what is compared with eager attention for each.

``python families.py`` writes the table of ``docs/transformers.md``; ``test_families.py`` compares it with the file, and
runs what it says. ``test_patterns.py`` runs the cells of patterns.
"""

import dataclasses
import functools
import pathlib
import re

import torch
import transformers
from tiny import VOCABULARY, WINDOW

from longspan.transformers._families import FAMILIES as RING_FAMILIES

TABLE = pathlib.Path(__file__).parents[3] / "docs" / "transformers.md"

#: What fields of configs are set to, where a config has them.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 256),
    "qk_rope_head_dim": 8,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "eos_token_id": None,
    # Tied, a model would say the same token again and again.
    "tie_word_embeddings": False,
}
#: Parts of the names of weights that are made larger.
QUERIES_AND_KEYS = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "q_lin", "k_lin", "Wq", "Wk")
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
#: The fields of T5Gemma's encoder and decoder.
T5GEMMA = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "pad_token_id", "eos_token_id", "bos_token_id"),
    *("sliding_window", "tie_word_embeddings"),
)
IMAGES = {"image_size": 48, "patch_size": 8}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family, by the class of its model."""

    title: str
    model: str
    options: dict = dataclasses.field(default_factory=dict, hash=False)
    kind: str = "decoder"
    """Or "encoder", "encoder-decoder", "vision"."""
    padding: tuple[str, ...] = ("left", "right")
    static: bool = True
    """Whether the family has a static cache."""
    sliding: bool = False
    """Whether some of its layers have a window, so that its caches drop keys."""
    pattern: bool = False
    """Whether it is compared with a user pattern too."""

    @property
    def checks(self) -> tuple[str, ...]:
        """What is compared."""
        if self.kind == "vision":
            return ("outputs",)
        caches = () if self.kind == "encoder" else ("dynamic",) + ("static",) * self.static
        others = ("sliding",) * self.sliding + ("pattern",) * self.pattern + ("training",) * (self.title in TRAINED)
        return ("outputs", *self.padding, *caches, *others)


def default_config_of(family, **options):
    """The config of a small model, otherwise as it is by default, dropouts too."""
    kind = getattr(transformers, family.model).config_class
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in SIZES.items() if name in known}
    return kind(**{**given, **options, **family.options})


def config_of(family):
    """The config of a small model without dropout."""
    known = dataclasses.fields(getattr(transformers, family.model).config_class)
    names = {field.name for field in known}
    return default_config_of(family, **{name: 0.0 for name in names if "drop" in name and name != "token_dropout"})


@functools.lru_cache(maxsize=1)
def made(family):
    """A model with random weights, the same each time; scores of queries and keys are spread over about ±10."""
    torch.manual_seed(11)
    model = getattr(transformers, family.model)._from_config(config_of(family), attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            if weight.ndim > 1 and any(part in name for part in QUERIES_AND_KEYS):
                weight.mul_(2)
            if name.endswith((".sinks", "relative_attention_bias.weight")):
                weight.normal_(0, 2)
            if name.endswith("Attention.q.weight"):
                # Of T5, whose scores have no scale.
                weight.mul_(0.5)
    if family.kind == "encoder-decoder" and model.config.tie_word_embeddings:
        # T5's are, whatever the config is given.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model.eval()


def _decoders():
    plain = (
        ("Apertus", "ApertusForCausalLM"),
        ("Arcee", "ArceeForCausalLM"),
        ("BioGPT", "BioGptForCausalLM"),
        ("BitNet", "BitNetForCausalLM"),
        ("Cohere", "CohereForCausalLM"),
        ("CTRL", "CTRLLMHeadModel"),
        ("ERNIE 4.5", "Ernie4_5ForCausalLM"),
        ("ERNIE 4.5 MoE", "Ernie4_5_MoeForCausalLM"),
        ("FlexOlmo", "FlexOlmoForCausalLM"),
        ("Gemma", "GemmaForCausalLM"),
        ("GLM", "GlmForCausalLM"),
        ("GLM-4", "Glm4ForCausalLM"),
        ("GLM-4 MoE", "Glm4MoeForCausalLM"),
        ("GPT-2", "GPT2LMHeadModel"),
        ("GPTBigCode", "GPTBigCodeForCausalLM"),
        ("GPT-NeoX", "GPTNeoXForCausalLM"),
        ("Granite", "GraniteForCausalLM"),
        ("GraniteMoE", "GraniteMoeForCausalLM"),
        ("Helium", "HeliumForCausalLM"),
        ("HunYuan dense", "HunYuanDenseV1ForCausalLM"),
        ("JetMoE", "JetMoeForCausalLM"),
        ("Llama", "LlamaForCausalLM"),
        ("MiniMax M2", "MiniMaxM2ForCausalLM"),
        ("NanoChat", "NanoChatForCausalLM"),
        ("Nemotron", "NemotronForCausalLM"),
        ("OLMo", "OlmoForCausalLM"),
        ("OLMo 2", "Olmo2ForCausalLM"),
        ("OLMoE", "OlmoeForCausalLM"),
        ("OPT", "OPTForCausalLM"),
        ("Persimmon", "PersimmonForCausalLM"),
        ("Phi", "PhiForCausalLM"),
        ("Qwen2", "Qwen2ForCausalLM"),
        ("Qwen2 MoE", "Qwen2MoeForCausalLM"),
        ("Qwen3", "Qwen3ForCausalLM"),
        ("Qwen3 MoE", "Qwen3MoeForCausalLM"),
        ("Seed-OSS", "SeedOssForCausalLM"),
        ("SmolLM3", "SmolLM3ForCausalLM"),
        ("StableLM", "StableLmForCausalLM"),
    )
    options = {"ERNIE 4.5 MoE": {"moe_k": 2}}
    for title, model in plain:
        yield Family(title, model, options.get(title, {}), pattern=title in PATTERNS)
    windows = (
        ("Afmoe", "AfmoeForCausalLM", LAYERS),
        ("Cohere 2", "Cohere2ForCausalLM", LAYERS),
        ("CWM", "CwmForCausalLM", LAYERS),
        ("EXAONE 4", "Exaone4ForCausalLM", LAYERS),
        ("Gemma 2", "Gemma2ForCausalLM", {**LAYERS, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}),
        ("Flint", "FlintForCausalLM", LAYERS),
        ("Gemma 3", "Gemma3ForCausalLM", LAYERS),
        ("gpt-oss", "GptOssForCausalLM", LAYERS),
        ("Granite SWA", "GraniteSWAForCausalLM", LAYERS),
        ("GraniteMoE SWA", "GraniteMoeSWAForCausalLM", LAYERS),
        ("MiMo V2 Flash", "MiMoV2FlashForCausalLM", LAYERS),
        ("Ministral", "MinistralForCausalLM", LAYERS),
        ("Mistral", "MistralForCausalLM", {}),
        ("Mixtral", "MixtralForCausalLM", {}),
        ("ModernBERT decoder", "ModernBertDecoderForCausalLM", {**LAYERS, "local_attention": 2 * WINDOW}),
        ("OLMo 3", "Olmo3ForCausalLM", LAYERS),
        ("Phi-3", "Phi3ForCausalLM", {}),
        ("PhiMoE", "PhimoeForCausalLM", {}),
        ("Starcoder 2", "Starcoder2ForCausalLM", {}),
        ("VaultGemma", "VaultGemmaForCausalLM", LAYERS),
    )
    for title, model, options in windows:
        yield Family(title, model, options, sliding=True, pattern=title in PATTERNS)
    # Chunks begin elsewhere in each row that is padded on the left.
    yield Family("Llama 4", "Llama4ForCausalLM", {"attention_chunk_size": 16}, padding=("right",))
    # Layers of other kinds beside attention.
    hybrid = {"layer_types": ["conv", "full_attention"]}
    yield Family("LFM2", "Lfm2ForCausalLM", hybrid, padding=("right",), static=False)


def _encoders():
    names = (
        ("ALBERT", "AlbertForMaskedLM", {}),
        ("BERT", "BertForMaskedLM", {}),
        ("CamemBERT", "CamembertForMaskedLM", {}),
        ("Data2Vec text", "Data2VecTextForMaskedLM", {}),
        ("DistilBERT", "DistilBertForMaskedLM", {}),
        ("ELECTRA", "ElectraForMaskedLM", {}),
        ("EmbeddingGemma", "Gemma3TextModel", {**LAYERS, "use_bidirectional_attention": True}),
        ("ERNIE", "ErnieForMaskedLM", {}),
        ("ESM", "EsmForMaskedLM", {"mask_token_id": 2, "token_dropout": False}),
        ("EuroBERT", "EuroBertForMaskedLM", {}),
        ("MobileBERT", "MobileBertForMaskedLM", {"intra_bottleneck_size": 32, "embedding_size": 32}),
        ("OpenAI privacy filter", "OpenAIPrivacyFilterForTokenClassification", {}),
        ("ModernBERT", "ModernBertForMaskedLM", {**LAYERS, "local_attention": 2 * WINDOW}),
        ("Nomic BERT", "NomicBertForMaskedLM", {}),
        ("RoBERTa", "RobertaForMaskedLM", {}),
        ("RoBERTa pre-LN", "RobertaPreLayerNormForMaskedLM", {}),
        ("XLM-RoBERTa", "XLMRobertaForMaskedLM", {}),
        ("XLM-RoBERTa XL", "XLMRobertaXLForMaskedLM", {}),
    )
    for title, model, options in names:
        yield Family(title, model, options, kind="encoder", pattern=title in PATTERNS)


def _others():
    pairs = (
        ("BART", "BartForConditionalGeneration"),
        ("Blenderbot", "BlenderbotForConditionalGeneration"),
        ("M2M100", "M2M100ForConditionalGeneration"),
        ("Marian", "MarianMTModel"),
        ("mBART", "MBartForConditionalGeneration"),
        ("Pegasus", "PegasusForConditionalGeneration"),
        ("PLBart", "PLBartForConditionalGeneration"),
    )
    for title, model in pairs:
        yield Family(title, model, {"forced_eos_token_id": None}, kind="encoder-decoder")
    part = {name: SIZES[name] for name in T5GEMMA} | LAYERS | {"query_pre_attn_scalar": 24, "attention_dropout": 0.0}
    parts = {"encoder": part, "decoder": part, "eos_token_id": None}
    yield Family("T5Gemma", "T5GemmaForConditionalGeneration", parts, kind="encoder-decoder", static=False)
    # There are distances past the last bucket.
    common = {"relative_attention_max_distance": 20, "decoder_start_token_id": 1}
    tables = (
        ("Flan-T5", "T5ForConditionalGeneration", {"feed_forward_proj": "gated-gelu"}),
        ("LongT5", "LongT5ForConditionalGeneration", {"local_radius": 7}),
        ("mT5", "MT5ForConditionalGeneration", {}),
        ("T5", "T5ForConditionalGeneration", {}),
        ("UMT5", "UMT5ForConditionalGeneration", {}),
    )
    for title, model, options in tables:
        yield Family(title, model, {**common, **options}, kind="encoder-decoder")
    pictures = (
        ("DINOv2", "Dinov2Model"),
        ("SigLIP vision", "SiglipVisionModel"),
        ("ViT", "ViTModel"),
    )
    for title, model in pictures:
        yield Family(title, model, IMAGES, kind="vision")


#: Families that are compared with a user pattern too.
PATTERNS = frozenset(
    (
        *("BERT", "Cohere", "Gemma 2", "Gemma 3", "GPT-2", "GPT-NeoX", "Llama", "Mistral", "OLMo 2", "OPT"),
        *("Phi", "Qwen3", "RoBERTa"),
    )
)
#: Families that are trained with the dropouts of their default configurations.
TRAINED = frozenset(
    (
        *("BART", "BERT", "DistilBERT", "EmbeddingGemma", "Flan-T5", "Gemma 3", "GPT-2", "gpt-oss", "Llama 4", "mT5"),
        *("OPT", "Qwen3", "RoBERTa", "T5", "T5Gemma", "UMT5"),
    )
)
FAMILIES = {family.title: family for make in (_decoders, _encoders, _others) for family in make()}


@dataclasses.dataclass(frozen=True)
class Refused:
    """A family that longspan refuses, and the message."""

    title: str
    model: str
    message: str
    reason: str
    options: dict = dataclasses.field(default_factory=dict, hash=False)
    kind: str = "decoder"


def _refused():
    bias = ("InklingAttention hands over position_bias, a bias of every pair", "a bias that depends on queries")
    compressed = ("DeepseekV4Attention adds compressed keys, which the mask of longspan has no", "compressed keys")
    yield Refused("DeepSeek V4", "DeepseekV4ForCausalLM", *compressed)
    yield Refused(
        "Doge", "DogeForCausalLM", "the mask of longspan is asked for dtype, expected it handed on", "a mask of its own"
    )
    yield Refused(
        "HunYuan V4", "HYV4ForCausalLM", "the mask of longspan is sliced, expected it handed on", "a mask of its own"
    )
    yield Refused("Inkling", "InklingForCausalLM", *bias)
    yield Refused(
        "LayoutLM", "LayoutLMForMaskedLM", "attention_mask is a tensor of shape", "a mask of its own", kind="encoder"
    )
    switch = ("a tensor of shape .2, 1, 1, 9. for SwitchTransformersAttention", "a mask of its own")
    yield Refused("Switch Transformers", "SwitchTransformersForConditionalGeneration", *switch, kind="encoder-decoder")


REFUSED = {family.title: family for family in _refused()}


def own_attention():
    """The modules of transformers whose models compute their attention themselves, as ``folder.module``."""
    folder = pathlib.Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(folder.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE):
            if "ALL_ATTENTION_FUNCTIONS.get_interface(" not in source:
                found.append(f"{path.parent.name}.{path.stem}")
    return found


HEAD = """# Models of transformers

What `attn_implementation="longspan"` is compared with eager attention on, with small random models of transformers \
{version}. Written by `python python/tests/transformers/families.py`; `test_families.py` compares it with this file, \
and runs every cell, `test_patterns.py` those of patterns.

- **outputs**: logits or hidden states, and all gradients; dropout 0
- **left**, **right**: the same with padding on that side
- **dynamic**, **static**: `generate` with that cache, tokens and logits
- **sliding**: `generate` with a cache that drops keys outside a layer's window
- **pattern**: outputs and gradients with a user pattern, against eager attention with the same pairs as a 4-D mask
- **training**: with the dropouts of the default configuration, a loss goes down; then `generate`, where there is a \
decoder

"""
COLUMNS = ("outputs", "left", "right", "dynamic", "static", "sliding", "pattern", "training")


def table():
    """The text of the file."""
    lines = [HEAD.format(version=transformers.__version__).replace("\\\n", "")]
    lines.append(f"## Families that are compared: {len(FAMILIES)}\n\n")
    lines.append(f"| family | model | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}\n")
    for title, family in sorted(FAMILIES.items(), key=lambda item: item[0].lower()):
        cells = ["✓" if column in family.checks else "" for column in COLUMNS]
        lines.append(f"| {title} | `{family.model}` | {' | '.join(cells)} |\n")
    lines.append("\n## Families that are refused\n\nEach by an error that says why.\n\n")
    lines.append("| family | model | why |\n|---|---|---|\n")
    for title, family in REFUSED.items():
        lines.append(f"| {title} | `{family.model}` | {family.reason} |\n")
    own = ", ".join(f"`{module.split('.modeling_')[1]}`" for module in own_attention())
    lines.append(
        "\n## Models that compute their attention themselves\n\nThey don't use transformers' `AttentionInterface`, "
        'so making one with `attn_implementation="longspan"` is an error. `set_attn_implementation` warns, and is an '
        f"error too if a pattern would be ignored. The modules of transformers that have such models:\n\n{own}\n"
    )
    lines.append(
        "\n## Context parallel\n\n`register(name, group=…, shards=…)` makes a name under which the ranks of a process "
        f"group hold one sequence together: {len(RING_FAMILIES)} of the families above, decoders whose layers get "
        "`position_ids` and mix tokens by attention alone. Others, caches and `generate` are refused. "
        "[Context-parallel training](context-parallel.md) says how.\n"
    )
    return "".join(lines)


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
