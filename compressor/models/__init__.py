"""Model families that transformers lacks; importing this package registers them with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from compressor.models.segments import (
    AllAttentionConfig,
    AllAttentionForCausalLM,
    AllAttentionModel,
    SegmentConfig,
    SegmentForCausalLM,
    SegmentOutput,
    SegmentPreTrainedModel,
    TransformerXLConfig,
    TransformerXLForCausalLM,
    TransformerXLModel,
    pruned,
)

AutoConfig.register("all-attention", AllAttentionConfig)
AutoConfig.register("transformer-xl", TransformerXLConfig)
AutoModel.register(AllAttentionConfig, AllAttentionModel)
AutoModel.register(TransformerXLConfig, TransformerXLModel)
AutoModelForCausalLM.register(AllAttentionConfig, AllAttentionForCausalLM)
AutoModelForCausalLM.register(TransformerXLConfig, TransformerXLForCausalLM)

__all__ = ["AllAttentionConfig", "AllAttentionForCausalLM", "AllAttentionModel", "SegmentConfig", "SegmentForCausalLM"]
__all__ += ["SegmentOutput", "SegmentPreTrainedModel", "TransformerXLConfig", "TransformerXLForCausalLM"]
__all__ += ["TransformerXLModel", "pruned"]
