#!/usr/bin/env bash
# On each trainer node: torchrun, a node's rank in the job being its rank in the step. Exit code AGAIN where it was ended.
set -uo pipefail
mkdir -p "$LOGS/pids"
ended='' binding=()
# Each rank on the cores next to its GPU.
if [ "${GPUS_PER_NODE:-0}" -gt 0 ] && command -v numactl >/dev/null; then binding=(--numa-binding=node); fi
# Slurm's SIGTERM need not reach more than this process (proctrack/cgroup): ranks save on SIGUSR1, as at a time limit.
save() {
    local file
    ended=yes
    for file in "$LOGS/pids/$SLURMD_NODENAME".*; do kill -USR1 "$(cat "$file")"; done
}
trap save TERM
"${VENV:+$VENV/bin/}python" -m torch.distributed.run --nnodes "$TRAINER_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$PROCESSES_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "${binding[@]}" --no-python bash "$MEGATRON_STARE/slurm/rank.sh" "$@" &
agent=$!
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do wait "$agent"; code=$?; done  # a signal ends `wait`
if [ -n "$ended" ]; then code=$AGAIN; fi
echo "$code" >"$LOGS/node_$SLURM_NODEID.exit"
exit "$code"
