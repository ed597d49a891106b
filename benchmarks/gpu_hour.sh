#!/bin/bash
# All figures of README.md, "On a GPU", by one GPU in 40 minutes, into OUT/NAME.txt:
#
#     sh tools/setup.sh --dev && benchmarks/gpu_hour.sh OUT [--tiny]
#
# Parts are in the order of their worth, and each has a limit of seconds, so that whatever ends the
# hour ends the parts of least worth. A part that fails does not stop the others. --tiny: the
# smallest sizes, on a CPU too, which shows that all parts run. TRL is compared if it is installed.
set -u
out=$(realpath -m "${1:?give a directory for the results}")
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-.venv/bin/python}
export LMHP_TEST_GPU=1
size=124M large='--model llama --size 1.2B' largest='--model llama --size 7B' episodes=64
precisions='bf16 tf32 fp32' batches=512,64,1 steps= repeats=2
update='--micro-batch-size 256 --updates 5 --warm-up 2 --profiled 2'
compared='--batch 128 --repeats 2'
if [ "${2-}" = --tiny ]; then
    size=test large='--size test' largest='--size test' episodes=2
    precisions=fp32 batches=2 steps='ppo --batch 1' repeats=1
    update='--batch 2 --micro-batch-size 1 --updates 1 --warm-up 0 --profiled 0'
    compared='--batch 1 --repeats 1 --threads 1'
fi

# part NAME SECONDS PROGRAM OPTION...
part() {
    name=$1 limit=$2 program=$3
    shift 3
    left=$((2400 - SECONDS))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -le 0 ]; then
        echo "$name: no time left"
        return
    fi
    started=$SECONDS
    echo "== $name: $program $*" | tee "$out/$name.txt"
    timeout --kill-after 10 "$limit" "$python" $program "$@" 2>&1 | tee -a "$out/$name.txt"
    echo "== status ${PIPESTATUS[0]} after $((SECONDS - started)) s" | tee -a "$out/$name.txt"
}

part tests 240 '-m pytest -n0 -q tests/gpu'
part million 360 "benchmarks/million_episodes.py --size $size $update --precision $precisions"
part sampling 120 "benchmarks/sampling.py --size $size --batches $batches"
part operators 90 "benchmarks/repeats.py operators --size $size --batch $episodes"
part resume 120 'benchmarks/repeats.py resume'
part plain_and_trl 300 "benchmarks/ppo_update.py --size $size $compared"
part memory 240 "benchmarks/memory.py $steps --size $size"
part memory_large 120 "benchmarks/adapters.py memory $large --batch $episodes"
part memory_large_bf16 120 "benchmarks/adapters.py memory $large --batch $episodes --bf16"
part speed_large 240 "benchmarks/adapters.py speed $large --batch $episodes --bf16 --repeats $repeats"
part memory_7b 300 "benchmarks/adapters.py memory $largest --batch 8 --bf16"
