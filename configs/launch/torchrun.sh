#!/bin/bash
# Train a config on one machine, or on several, on each of which this is started; options of torchrun come by variables:
#     configs/launch/torchrun.sh --config fit.yaml
#     PET_NNODES=2:4 PET_RDZV_ENDPOINT=host0:29400 configs/launch/torchrun.sh --config fit.yaml
# A process that ends is started again with all others, and a machine that is lost (but the first) is done without, if
# PET_NNODES allows it, or with another one in its place. Each start goes on where the last one ended, from a folder
# that all machines see.

python -m lightning_accel fit "$@" --print_config > /dev/null || exit # wrong options are told at once, and once
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or those that are started again may wait for addresses of dead ones
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-auto} PET_MAX_RESTARTS=${PET_MAX_RESTARTS:-3}
export PET_RDZV_BACKEND=${PET_RDZV_BACKEND:-c10d} PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT:-localhost:29400}
exec torchrun --no-python bash -c '
    exec python -m lightning_accel fit --ckpt_path auto "$@" \
        --trainer.num_nodes "$GROUP_WORLD_SIZE" --trainer.devices "$LOCAL_WORLD_SIZE"
' fit "$@"
