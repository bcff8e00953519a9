"""Tiny models of many architectures of transformers, built from configurations, and the table of them.

``python -m tests.models.architectures`` prints docs/architectures.md; the tests compare the two.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

__all__ = ["FAMILIES", "Family", "page"]

VOCABULARY = 48
Batch = dict[str, Tensor]

# What most configurations call their sizes; a class ignores what it does not know.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = dict.fromkeys(
    (
        "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "attention_dropout", "resid_pdrop",
        "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout", "classifier_dropout", "dropout_rate",
        "embedding_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "residual_dropout", "attn_dropout",
        "feat_proj_dropout", "final_dropout", "drop_path_rate", "embed_dropout", "mlp_dropout",
        "classifier_dropout_prob", "hidden_dropout_rate", "classifier_proj_dropout",
    ),
    0.0,
)  # fmt: skip


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens(rows: int, positions: int, seed: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, positions), generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> Batch:
    """(B, S) tokens; a few labels are ignored, and some rows are padded at their end."""
    tokens = _tokens(4, 7, seed)
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[1, 4:] = -100
    mask[1, 5:] = 0
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def unmasked_text(seed: int) -> Batch:
    """The same without a mask, for models that have none."""
    batch = text(seed)
    del batch["attention_mask"]
    return batch


def translation(seed: int) -> Batch:
    """Sources and shorter targets."""
    return {"input_ids": _tokens(4, 7, seed), "labels": _tokens(4, 5, seed + 1)}


def images(seed: int) -> Batch:
    """(B, 3, 32, 32) pixels, and a class for each image."""
    classes = torch.randint(5, (4,), generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": _draw(4, 3, 32, 32, seed=seed), "labels": classes}


def spectrograms(seed: int) -> Batch:
    """(B, 8 bands, 40 frames), and what was said."""
    return {"input_features": _draw(4, 8, 40, seed=seed), "labels": _tokens(4, 5, seed)}


def waves(seed: int) -> Batch:
    """(B, samples), and a class for each recording."""
    classes = torch.randint(5, (4,), generator=torch.Generator().manual_seed(seed))
    return {"input_values": _draw(4, 400, seed=seed), "labels": classes}


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        name: as the table shows it.
        kind: decoder, encoder, ...
        model: name of the class in transformers.
        batch: makes a batch from a seed.
        options: of the configuration, beside `SIZES` and `NO_DROPOUT`.
        num_microbatches: into which a batch may be split without changing the model's result.
        remark: why, if that is 1.
    """

    name: str
    kind: str
    model: str
    batch: Callable[[int], Batch] = text
    options: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 3
    remark: str = ""

    def __str__(self) -> str:
        return self.name

    def build(self) -> torch.nn.Module:
        """The model, with random weights."""
        model_class = getattr(transformers, self.model)
        config_class = model_class.config_class
        other_names = getattr(config_class, "attribute_map", {})
        known = config_class().to_dict().keys() | other_names.keys()
        options = {
            name: value
            for name, value in {**SIZES, **NO_DROPOUT}.items()
            if name in known and other_names.get(name) not in self.options
        }
        model: torch.nn.Module = model_class(config_class(**{**options, **self.options}))
        with torch.no_grad():  # Biases that start at zero have no scale of their own to compare against.
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
        return model


_SPEECH = {
    "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2, "num_labels": 5,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "classifier_proj_size": 8,
}  # fmt: skip
_ENCODER_DECODER = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_PICTURE = {"image_size": 32, "patch_size": 8, "num_labels": 5}
_NORMALISED = "batch normalisation"

FAMILIES = [
    Family("Llama", "decoder", "LlamaForCausalLM"),
    Family("Mistral", "decoder", "MistralForCausalLM", options={"sliding_window": 4}),
    Family("Ministral", "decoder", "MinistralForCausalLM"),
    Family("Qwen2", "decoder", "Qwen2ForCausalLM"),
    Family("Qwen3", "decoder", "Qwen3ForCausalLM", options={"tie_word_embeddings": True}),
    Family("Gemma", "decoder", "GemmaForCausalLM"),
    Family("Gemma 2", "decoder", "Gemma2ForCausalLM", options={"query_pre_attn_scalar": 8, "sliding_window": 4}),
    Family("Gemma 3", "decoder", "Gemma3ForCausalLM", options={"query_pre_attn_scalar": 8, "sliding_window": 4}),
    Family("Phi", "decoder", "PhiForCausalLM"),
    Family("Phi-3", "decoder", "Phi3ForCausalLM"),
    Family("GPT-2", "decoder", "GPT2LMHeadModel", options={"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}),
    Family("GPT-NeoX", "decoder", "GPTNeoXForCausalLM"),
    Family("GPT-J", "decoder", "GPTJForCausalLM", options={"n_embd": 16, "n_layer": 3, "n_head": 2, "rotary_dim": 4}),
    Family("OPT", "decoder", "OPTForCausalLM", options={"ffn_dim": 24, "word_embed_proj_dim": 16}),
    Family("BLOOM", "decoder", "BloomForCausalLM", options={"n_layer": 3, "n_head": 2}),
    Family("Falcon", "decoder", "FalconForCausalLM"),
    Family("StarCoder2", "decoder", "Starcoder2ForCausalLM"),
    Family("OLMo 2", "decoder", "Olmo2ForCausalLM"),
    Family("Cohere", "decoder", "CohereForCausalLM"),
    Family("Granite", "decoder", "GraniteForCausalLM"),
    Family("GLM", "decoder", "GlmForCausalLM"),
    Family("StableLM", "decoder", "StableLmForCausalLM"),
    Family("SmolLM3", "decoder", "SmolLM3ForCausalLM"),
    Family("Mixtral", "mixture of experts", "MixtralForCausalLM", options={"num_local_experts": 4}),
    Family("Qwen3-MoE", "mixture of experts", "Qwen3MoeForCausalLM",
           options={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}),
    Family("OLMoE", "mixture of experts", "OlmoeForCausalLM", options={"num_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "DeepSeek-V3", "mixture of experts", "DeepseekV3ForCausalLM",
        options={
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1,
            "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 4,
            "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
    ),
    Family("Mamba", "state space", "MambaForCausalLM", unmasked_text, {"state_size": 4, "time_step_rank": 2}),
    Family(
        "Mamba-2", "state space", "Mamba2ForCausalLM", unmasked_text,
        {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    Family("FalconMamba", "state space", "FalconMambaForCausalLM", unmasked_text,
           {"state_size": 4, "time_step_rank": 2}),
    Family("BERT", "encoder", "BertForMaskedLM"),
    Family("RoBERTa", "encoder", "RobertaForMaskedLM"),
    Family("DistilBERT", "encoder", "DistilBertForMaskedLM",
           options={"dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2}),
    Family("ELECTRA", "encoder", "ElectraForMaskedLM", options={"embedding_size": 8}),
    Family("ALBERT", "encoder", "AlbertForMaskedLM", options={"embedding_size": 8}),
    Family("DeBERTa-v2", "encoder", "DebertaV2ForMaskedLM",
           options={"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Family("ModernBERT", "encoder", "ModernBertForMaskedLM",
           options={"local_attention": 4, "cls_token_id": 1, "sep_token_id": 1}),
    Family("T5", "encoder-decoder", "T5ForConditionalGeneration", translation,
           {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}),
    Family("BART", "encoder-decoder", "BartForConditionalGeneration", translation, _ENCODER_DECODER),
    Family("Pegasus", "encoder-decoder", "PegasusForConditionalGeneration", translation, _ENCODER_DECODER),
    Family("Marian", "encoder-decoder", "MarianMTModel", translation,
           {**_ENCODER_DECODER, "decoder_vocab_size": VOCABULARY}),
    Family("ViT", "vision", "ViTForImageClassification", images, _PICTURE),
    Family("DINOv2", "vision", "Dinov2ForImageClassification", images, _PICTURE),
    Family("BEiT", "vision", "BeitForImageClassification", images, _PICTURE),
    Family("Swin", "vision", "SwinForImageClassification", images,
           {**_PICTURE, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    Family("ConvNeXt", "vision", "ConvNextForImageClassification", images,
           {"num_labels": 5, "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2}),
    Family("ResNet", "vision", "ResNetForImageClassification", images,
           {"num_labels": 5, "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1]}, 1, _NORMALISED),
    Family("Whisper", "speech", "WhisperForConditionalGeneration", spectrograms,
           {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16,
            "suppress_tokens": None, "begin_suppress_tokens": None}),
    Family("wav2vec 2.0", "speech", "Wav2Vec2ForSequenceClassification", waves, _SPEECH),
    Family("HuBERT", "speech", "HubertForSequenceClassification", waves, _SPEECH),
    Family("WavLM", "speech", "WavLMForSequenceClassification", waves,
           {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 8}),
]  # fmt: skip


def page() -> str:
    """The text of docs/architectures.md."""
    lines = [
        "# Architectures",
        "",
        "Each of these models of transformers is built from a tiny configuration and trained with two workers by",
        "`tests/models/test_architectures.py`, which also keeps this table. Losses, gradients and weights equal those",
        "of plain Lightning, and no line of a model's code is changed. Others work as well if they keep to the",
        "[limits](limits.md).",
        "",
        "| architecture | kind | class | micro-batches |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {family.name} | {family.kind} | `{family.model}` |"
        f" {f'1: {family.remark}' if family.remark else 'any number'} |"
        for family in FAMILIES
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
