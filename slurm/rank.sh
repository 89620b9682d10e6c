#!/usr/bin/env bash
# One rank: its log, its process id for signals, and what became of it.
set -uo pipefail
name=$LOGS/rank_$(printf %05d "$RANK")
export PYTHON=${VENV:+$VENV/bin/}python PID_FILE=$LOGS/pids/$SLURMD_NODENAME.$RANK
# CUDA reads this when it starts; sends are launched before the products that they overlap with.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# Compiled kernels on the node's own disk: every rank writes there at once.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton_$UID}
trap : TERM INT USR1  # the rank handles them; this waits for it
cd "$MEGATRON_STARE" || exit
run() { bash -c 'echo $$ >"$PID_FILE" && exec "$PYTHON" -u -m megatron_stare "$@"' megatron_stare "$@"; }
# torchrun ends the whole group of processes: without tee, the rank's next line would end it before it has saved.
if [ "$RANK" = 0 ]; then run "$@" > >(trap '' TERM INT && exec tee -a "$name.log") 2>&1; else run "$@" >>"$name.log" 2>&1; fi
code=$?
rm -f "$PID_FILE"
if [ "$code" -ne 0 ]; then
    echo "$code" >"$name.exit"
    echo "$(date +%s.%N) $RANK" >"$name.ended"
    # By a signal, but not by the one that ends the others when one has failed.
    if [ "$code" -gt 128 ] && [ "$code" -ne 143 ]; then
        echo "rank $RANK on $SLURMD_NODENAME was killed by SIG$(kill -l "$code")" >>"$name.log"
        mv "$name.ended" "$name.killed"
    fi
fi
exit "$code"
