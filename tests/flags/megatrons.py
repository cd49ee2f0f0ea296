# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags that meet ours, in groups that belong together; and layouts over two processes."""

from hypothesis import strategies as st

from tests.flags.combination import Group


def _groups(text: str) -> tuple[Group, ...]:
    """One group a line."""
    return tuple(tuple(line.split()) for line in text.strip().splitlines())


SIZES = _groups("""
    --num-layers=1
    --num-layers=3
    --hidden-size=24 --num-attention-heads=3
    --hidden-size=18 --num-attention-heads=3 --kv-channels=4
    --seq-length=13 --max-position-embeddings=16
    --seq-length=1 --max-position-embeddings=16
    --seq-length=33 --max-position-embeddings=40
    --micro-batch-size=1 --global-batch-size=2
    --micro-batch-size=3 --global-batch-size=6
    --micro-batch-size=1 --global-batch-size=8
    --make-vocab-size-divisible-by=128
    --make-vocab-size-divisible-by=1
    --vocab-size=5 --make-vocab-size-divisible-by=1
""")
MODELS = _groups("""
    --untie-embeddings-and-output-weights
    --position-embedding-type=rope
    --position-embedding-type=rope --rotary-percent=0.5
    --position-embedding-type=rope --rotary-interleaved
    --position-embedding-type=none
    --normalization=RMSNorm
    --swiglu --disable-bias-linear
    --squared-relu
    --qk-layernorm
    --group-query-attention --num-query-groups=1
    --mtp-num-layers=1 --position-embedding-type=rope --untie-embeddings-and-output-weights
    --mtp-num-layers=1 --position-embedding-type=none
    --mtp-num-layers=2 --mtp-use-repeated-layer --position-embedding-type=rope
    --hidden-dropout=0 --attention-dropout=0
    --apply-residual-connection-post-layernorm
    --softmax-type=off-by-one
    --attention-output-gate
    --use-mup
    --window-size=4,0
    --add-qkv-bias
""")
_EXPERTS = _groups("""
    --moe-router-load-balancing-type=none
    --moe-router-load-balancing-type=aux_loss --moe-aux-loss-coeff=0.01
    --moe-router-load-balancing-type=seq_aux_loss --moe-aux-loss-coeff=0.01
    --moe-router-load-balancing-type=global_aux_loss --moe-aux-loss-coeff=0.01
    --moe-router-load-balancing-type=sinkhorn --moe-router-topk=1 --moe-router-pre-softmax
    --moe-router-topk=1 --moe-router-pre-softmax --moe-aux-loss-coeff=0.01 --moe-z-loss-coeff=0.001
    --moe-token-dispatcher-type=alltoall --moe-router-score-function=sigmoid
    --moe-router-score-function=sigmoid --moe-router-enable-expert-bias
    --moe-token-dispatcher-type=alltoall --moe-expert-capacity-factor=1.0
    --moe-layer-freq=2
    --moe-token-dispatcher-type=alltoall --moe-shared-expert-intermediate-size=16
    --moe-layer-recompute
    --moe-input-jitter-eps=0.01
    --moe-router-dtype=fp64
    --moe-token-dispatcher-type=alltoall --overlap-moe-expert-parallel-comm --bf16
    --moe-router-num-groups=2 --moe-router-group-topk=1 --moe-router-topk=1 --moe-router-pre-softmax
    --moe-router-force-load-balancing
    --moe-grouped-gemm
""")
EXPERTS = tuple(("--num-experts=4", "--disable-bias-linear", *group) for group in _EXPERTS)
NUMBERS = _groups("""
    --bf16
    --fp16
    --fp16 --loss-scale=128
    --fp16 --initial-loss-scale=1024
    --bf16 --accumulate-allreduce-grads-in-fp32
    --bf16 --grad-reduce-in-bf16
    --fp16 --fp16-lm-cross-entropy
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --attention-softmax-in-fp32
    --deterministic-mode
    --no-check-for-nan-in-loss-and-grad
    --check-for-spiky-loss
    --check-for-large-grads
    --rerun-mode=disabled
""")
OPTIMIZERS = _groups("""
    --optimizer=sgd
    --optimizer=sgd --sgd-momentum=0
    --use-distributed-optimizer
    --use-distributed-optimizer --overlap-grad-reduce
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --overlap-grad-reduce
    --ddp-average-in-collective
    --use-distributed-optimizer --bf16
    --use-torch-fsdp2 --untie-embeddings-and-output-weights --no-ckpt-fully-parallel-save --ckpt-format=torch_dcp
    --clip-grad=0
    --clip-grad=0.1
    --clip-grad=-1
    --weight-decay=0
    --lr-warmup-iters=1
    --lr-decay-style=cosine --lr-decay-iters=4
    --log-num-zeros-in-grad
    --log-params-norm
    --data-parallel-random-init
""")
MEMORY = _groups("""
    --recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1
    --recompute-granularity=full --recompute-method=uniform --recompute-num-layers=2
    --recompute-granularity=full --recompute-method=block --recompute-num-layers=1
    --recompute-granularity=selective
    --recompute-activations
    --cuda-graph-impl=local
    --empty-unused-memory-level=1
""")
DATA = _groups("""
    --reset-position-ids
    --reset-attention-mask
    --reset-position-ids --reset-attention-mask --eod-mask-loss
    --eod-mask-loss
    --dataloader-inter-document-masking --micro-batch-size=1
    --dataloader-inter-document-masking
    --no-create-attention-mask-in-dataloader
    --dataloader-type=cyclic
    --dataloader-type=single --num-workers=0
    --rampup-batch-size 2 2 4
    --sft
""")
LENGTHS = _groups("""
    --train-iters=1
    --train-iters=3
    --train-iters=5
    --train-samples=8
    --train-samples=12 --log-interval=2
    --log-interval=2
    --log-interval=3
    --eval-iters=1 --eval-interval=1
    --eval-iters=1 --eval-interval=2
    --skip-train
    --exit-interval=1
    --iterations-to-skip=0
    --train-iters=1 --log-throughput
    --timing-log-level=2
    --manual-gc --manual-gc-interval=1
    --tensorboard-dir={out}/tensorboard --tensorboard-log-interval=1
    --yaml-cfg=nowhere.yaml
    --profile --use-pytorch-profiler --profile-step-start=1 --profile-step-end=2 --tensorboard-dir={out}/profile
""")
SAVES = _groups("""
    --save={out}/saved --save-interval=1
    --save={out}/saved --save-interval=2 --ckpt-format=torch
    --save={out}/saved --save-interval=1 --no-save-optim
    --save={out}/saved --save-interval=1 --load={out}/saved
    --save={out}/saved --save-interval=2 --load={out}/saved --ckpt-format=torch
    --save={out}/saved --save-interval=1 --load={out}/saved --no-load-optim --no-load-rng
    --save={out}/saved --save-interval=1 --load={out}/saved --no-save-optim --finetune
    --load={out}/nowhere
    --load={out}/nowhere --finetune
""")
LAYOUTS = _groups("""
    --tensor-model-parallel-size=2
    --tensor-model-parallel-size=2 --sequence-parallel
    --pipeline-model-parallel-size=2
    --pipeline-model-parallel-size=2 --num-layers=4 --num-layers-per-virtual-pipeline-stage=1
    --context-parallel-size=2
    --context-parallel-size=2 --calculate-per-token-loss
    --expert-model-parallel-size=2 --num-experts=4 --disable-bias-linear --moe-token-dispatcher-type=alltoall
    --use-distributed-optimizer
    --use-torch-fsdp2 --untie-embeddings-and-output-weights --no-ckpt-fully-parallel-save --ckpt-format=torch_dcp
""")
"""Over two processes; the last ones split the data alone."""
_ONE_IN = 12  # combinations take two processes


@st.composite
def flags(draw: st.DrawFn) -> tuple[tuple[Group, ...], int]:
    """Up to five groups, no two from one table, and on how many processes they are to run."""
    tables = (SIZES, MODELS, MODELS, NUMBERS, OPTIMIZERS, MEMORY, DATA, LENGTHS, EXPERTS, SAVES)
    chosen = draw(st.lists(st.integers(0, len(tables) - 1), max_size=5, unique=True))
    groups = [draw(st.sampled_from(tables[number])) for number in chosen]
    split = draw(st.integers(0, _ONE_IN - 1)) == _ONE_IN - 1
    if split:
        groups.append(draw(st.sampled_from(LAYOUTS)))
    return tuple(groups), 2 if split else 1
