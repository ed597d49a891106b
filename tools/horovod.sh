#!/bin/sh
# Compiles Horovod into .venv, against the torch and the MPI there: `sh tools/horovod.sh`, after tools/setup.sh.
# Needs g++ and make; cmake comes from Pipfile.lock. With a GPU in sight, or HOROVOD_GPU_OPERATIONS=NCCL, it is built
# with the NCCL that torch itself uses; the CUDA compiler then comes from CUDA_HOME, or else from the package index.
# Without, it is built without CUDA, whatever torch is.
set -eu
cd -P "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH

export HOROVOD_CMAKE="$PWD/tools/horovod-cmake"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_GLOO=1

if [ "${HOROVOD_GPU_OPERATIONS:-}" = NCCL ] ||
        python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    nvidia=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")')
    if [ -z "${CUDA_HOME:-}" ]; then
        python -m pip install --quiet 'cuda-toolkit[nvcc,cudart,cccl]'
        CUDA_HOME=$(echo "$nvidia"/cu[0-9]*)
        ln -sfn lib "$CUDA_HOME/lib64"
        ln -sf "$(cd "$CUDA_HOME/lib" && ls libcudart.so.[0-9]* | head -n 1)" "$CUDA_HOME/lib/libcudart.so"
    fi
    ln -sf libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"
    export CUDA_HOME HOROVOD_CUDA_HOME="$CUDA_HOME" PATH="$CUDA_HOME/bin:$PATH"
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_HOME="$nvidia/nccl"
fi

pipenv sync --categories distributed
python -c 'import horovod.torch as hvd; print("Horovod is ready: MPI", hvd.mpi_built(), "NCCL", hvd.nccl_built())'
