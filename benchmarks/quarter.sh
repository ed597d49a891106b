#!/bin/bash
# What a quarter of an hour of one GPU can show, into the one file OUT/quarter.txt, a table last:
#
#     PYTHON=python3 benchmarks/quarter.sh OUT [--tiny]
#
# Parts are in the order of their worth, each with a limit of seconds, so that whatever ends the
# time ends the parts of least worth. A part that fails does not stop the others. It installs
# nothing. SECONDS_IN_ALL (780): of all parts. --tiny: the smallest sizes, on a CPU too, which shows
# that all parts run.
set -u
out=$(realpath -m "${1:?give a directory for the results}")
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-.venv/bin/python} all=${SECONDS_IN_ALL:-780} log=$out/quarter.txt
export LMHP_TEST_GPU=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
size=124M large='--model llama --size 1.2B --batch 64'
million='--updates 4 --warm-up 2 --profiled 1' low=bf16 both='bf16 tf32' episodes=128 batches=512 steps=
if [ "${2-}" = --tiny ]; then
    size=test large='--size test --batch 2' episodes=2 batches=2
    million='--batch 2 --updates 1 --warm-up 0 --profiled 0' low=fp32 both=fp32 steps='ppo --batch 1'
fi
: > "$log"

# part NAME SECONDS PROGRAM OPTION...
part() {
    name=$1 limit=$2 program=$3
    shift 3
    left=$((all - SECONDS))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -le 0 ]; then
        echo "== $name: no time left" | tee -a "$log"
        return
    fi
    started=$SECONDS
    echo "== $name: $program $*" | tee -a "$log"
    timeout --kill-after 5 "$limit" "$python" $program "$@" 2>&1 | tee -a "$log"
    echo "== $name: status ${PIPESTATUS[0]} after $((SECONDS - started)) s" | tee -a "$log"
}

part million 180 "benchmarks/million_episodes.py --size $size $million --precision $both"
part tests 150 '-m pytest -n0 -q tests/gpu'
part resume 90 "benchmarks/repeats.py resume --precision $low"
part to_the_bit 90 "benchmarks/repeats.py operators --size $size --batch $episodes --precision $low"
part sampling 60 "benchmarks/sampling.py --size $size --batches $batches"
part memory 60 "benchmarks/memory.py $steps --size $size"
part memory_large 90 "benchmarks/adapters.py memory $large --bf16"
part speed_large 90 "benchmarks/adapters.py speed $large --bf16 --repeats 1"

echo
echo '==== what was found'
grep -E '^(==.* (status|no time left)|NVIDIA|bf16|tf32|fp32|.*[0-9] passed|nondeterministic|weights of|killed and|not killed|batch|process)' \
    "$log" | cut -c1-160 | tee -a "$log"
