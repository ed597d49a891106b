#!/bin/sh
# Compiles Horovod into .venv, against the torch and the MPICH there: `sh tools/horovod.sh`, after tools/setup.sh.
# `MPI=openmpi sh tools/horovod.sh` compiles it against the Open MPI on the PATH instead. .venv holds one Horovod: ranks
# that speak the other MPI average by torch.
# Needs g++ and make; cmake comes from Pipfile.lock. With a GPU in sight, or HOROVOD_GPU_OPERATIONS=NCCL, it is built
# with the NCCL that torch itself uses; the CUDA compiler then comes from CUDA_HOME, or else from the package index.
# Without, it is built without CUDA, whatever torch is.
# A build for the MPICH of .venv and without CUDA is kept in ~/.cache/lm-human-preferences/horovod, for other clones.
# The others are not: they hold paths of the CUDA libraries in .venv, or of a cluster's Open MPI.
set -eu
cd -P "$(dirname "$0")/.."

fail() { echo "error: $1" >&2; exit 2; }

# Prints the first C++ compiler on the PATH that is Open MPI's and finds its headers. MPICH's may come before it.
open_mpi_compiler() {
    echo "$PATH" | tr : '\n' | while read -r folder; do
        for compiler in "$folder/mpicxx" "$folder/mpicxx.openmpi"; do
            if "$compiler" --showme:version 2>/dev/null | grep -q 'Open MPI' &&
                    echo '#include <mpi.h>' | "$compiler" -E -x c++ - >/dev/null 2>&1; then
                echo "$compiler"
                return
            fi
        done
    done
}

case "${MPI:-mpich}" in
mpich)
    library=libmpi.so.12
    spoken='MPICH, as those that --mpi or srun --mpi=pmi2 starts' ;;
openmpi)
    library=libmpi.so.40
    spoken='Open MPI, as those that its mpiexec or srun --mpi=pmix starts'
    HOROVOD_MPICXX=$(open_mpi_compiler)
    [ -n "$HOROVOD_MPICXX" ] || fail "MPI=openmpi: the PATH has no mpicxx of an Open MPI with headers; on Debian or\
 Ubuntu: apt install libopenmpi-dev; on a cluster: load its module of Open MPI"
    export HOROVOD_MPICXX ;;
*) fail "MPI=$MPI: it is mpich or openmpi" ;;
esac
PATH=$PWD/.venv/bin:$PATH
[ -n "${CXX:-}" ] || command -v g++ >/dev/null || fail 'there is no g++; on Debian or Ubuntu: apt install g++ make'

# Prints the folder for a build of this kind. In its name is a digest of all that the build depends on, but the path of
# .venv: the library finds those of .venv by where it is itself. It is the user's own folder, whatever LMHP_CACHE says,
# since what is kept there is executed.
folder_of_build() {
    python - <<END
import hashlib, importlib.metadata, os, pathlib, platform, shlex, subprocess, sysconfig, torch
compiler = shlex.split(os.environ.get('CXX') or 'g++')
flags = ('HOROVOD_', 'MPI', 'I_MPI', 'CMAKE_', 'CC', 'CXX', 'CFLAGS', 'CPPFLAGS', 'LDFLAGS', 'CPATH', 'LIBRARY_PATH')
parts = [
    platform.machine(),
    platform.libc_ver(),
    sysconfig.get_config_vars('SOABI', 'CONFIG_ARGS'),
    [torch.__version__, torch.version.git_version, torch.__config__.show()],
    importlib.metadata.version('mpich'),
    subprocess.run([*compiler, '--version'], capture_output=True, check=True).stdout,
    sorted((name, value) for name, value in os.environ.items() if name.startswith(flags)),
    [pathlib.Path(path).read_bytes() for path in ('Pipfile.lock', 'tools/horovod.sh', 'tools/horovod-cmake')],
]
digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
print(os.path.expanduser(f'~/.cache/lm-human-preferences/horovod/{digest}'))
END
}

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

if [ -z "${HOROVOD_MPICXX:-}${HOROVOD_GPU_OPERATIONS:-}" ]; then
    PIPENV_CACHE_DIR=$(folder_of_build)  # its pip keeps the wheel there
    export PIPENV_CACHE_DIR
    # From the folder of the library: .venv/lib, and lib of torch.
    export HOROVOD_RPATH='$ORIGIN/../../../..:$ORIGIN/../../torch/lib'
else
    export PIP_NO_CACHE_DIR=1
fi
export HOROVOD_CMAKE="$PWD/tools/horovod-cmake"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_GLOO=1

# Prints against which MPI library Horovod was built, if it is there.
built_against() {
    python -c "from lm_human_preferences.distributed import horovod
mpi = horovod.mpi_of_build()
print(mpi and mpi.soname)"
}

case "$(built_against)" in None | $library) ;; *) python -m pip uninstall --quiet --yes horovod ;; esac
pipenv sync --categories distributed
[ "$(built_against)" = $library ] || fail "Horovod was built against $(built_against), not $library"
python -c 'import horovod.torch as hvd; print("Horovod is ready: MPI", hvd.mpi_built(), "NCCL", hvd.nccl_built())'
echo "Ranks of $spoken, average by it; those of the other MPI average by torch."
