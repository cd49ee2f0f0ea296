# SPDX-License-Identifier: Apache-2.0
"""Decisions of the pretraining script itself: layouts that it refuses, and which stages hold the embeddings."""

from types import SimpleNamespace

import pytest

# What Megatron says at import, of layers that are not installed, is not what is tested here.
pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


PIPELINE, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"


def arguments(**given: object) -> SimpleNamespace:
    usual = {PIPELINE: 1, VIRTUAL: None, "context_parallel_size": 1, "transformer_impl": "local", "micro_batch_size": 2}
    usual |= dict.fromkeys(("sft", "reset_attention_mask", "dataloader_inter_document_masking", "hybrid_layer_pattern"))
    return SimpleNamespace(**usual | given)


LOST = [
    ({"reset_attention_mask": True, PIPELINE: 3}, "first and the last pipeline stage only"),
    ({"reset_attention_mask": True, PIPELINE: 2, VIRTUAL: 2}, "use --dataloader-inter-document-masking with"),
    ({"reset_attention_mask": True, "transformer_impl": "transformer_engine"}, "has no effect with"),
    ({"dataloader_inter_document_masking": True, "context_parallel_size": 2}, "leave --context-parallel-size out"),
    ({"dataloader_inter_document_masking": True, PIPELINE: 2}, "set --micro-batch-size 1"),
    ({"sft": True, PIPELINE: 2}, "--sft packs a micro-batch .* set --micro-batch-size 1"),
    ({"hybrid_context_parallel": True}, "--hybrid-context-parallel is read by Megatron-LM's own pretrain_gpt.py alone"),
]


@pytest.mark.parametrize(("given", "sentence"), LOST)
def test_what_would_be_lost_is_refused(given: dict[str, object], sentence: str) -> None:
    from simreg_megatron.pretrain import check_settings

    with pytest.raises(ValueError, match=sentence):
        check_settings(arguments(**given))


def test_a_middle_stage_that_predicts_further_holds_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import LayerType

    from simreg_megatron import pretrain

    stages = [[[LayerType.embedding]], [[LayerType.mtp]], [[LayerType.loss]]]
    config = SimpleNamespace(mtp_num_layers=1, pipeline_model_parallel_layout=SimpleNamespace(layout=stages))
    monkeypatch.setattr(pretrain, "get_args", lambda: SimpleNamespace(untie_embeddings_and_output_weights=True))
    monkeypatch.setattr(pretrain, "core_transformer_config_from_args", lambda args: config)
    assert pretrain.embedding_ranks([4, 5, 6]) == [4, 5]
