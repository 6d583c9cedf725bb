#!/bin/bash
# Train a config on machines of a Slurm cluster. What stands before this file are options of sbatch, after it of fit:
#     sbatch --nodes=2 --ntasks-per-node=8 --cpus-per-task=8 --gpus-per-node=8 configs/launch/slurm.sh --config fit.yaml
# Two minutes before the time limit the run is told, saves, and has the job started again. Slurm does so, too, when a
# machine fails, and this script when a process does, up to three times. Each start goes on where the last one ended.
#SBATCH --job-name=fit --nodes=1 --ntasks-per-node=1 --cpus-per-task=1 --time=24:00:00
#SBATCH --signal=SIGUSR1@120 --requeue --open-mode=append --output=slurm-%j.log

python -m lightning_accel fit "$@" --print_config > /dev/null || exit # wrong options are told at once, and once
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python -m lightning_accel fit --ckpt_path auto "$@" \
    --trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE"
status=$?
((status == 0)) && exit
echo "$(date): a process ended with status $status" | tee -a "slurm-$SLURM_JOB_ID.failures"
if (($(wc -l < "slurm-$SLURM_JOB_ID.failures") <= 3)); then
    echo "the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
