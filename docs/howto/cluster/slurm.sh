#!/bin/bash
# Fine-tuning on several nodes: sbatch slurm.sh CONFIG [section.key=value ...]
#SBATCH --job-name=glm-accelerate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
set -u
port=29500
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address by which the other nodes reach the first one: its name may mean 127.0.1.1 on itself.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname -I | awk '{print $1}')

# A node that fails neither ends the job (--no-kill) nor the launchers of the others.
srun --no-kill --kill-on-bad-exit=0 glm-accelerate train "$@" \
    --nproc "$SLURM_GPUS_ON_NODE" --nnodes "1:$SLURM_NNODES" --rendezvous "$address:$port"
code=$?
if [ "$code" -eq 75 ]; then  # stopped with everything saved: go on when there is time again
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
