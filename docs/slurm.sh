#!/bin/bash
#SBATCH --ntasks=8
#SBATCH --gpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

stop_and_requeue() {
    trap '' TERM
    scancel --signal=TERM "$SLURM_JOB_ID"
    wait "$ranks"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap stop_and_requeue TERM

srun --mpi=pmi2 --kill-on-bad-exit .venv/bin/python ./launch.py train_policy descriptiveness slurm --save_dir /shared/runs --run.resume on --run.stop_timeout 100 &
ranks=$!
wait "$ranks"
