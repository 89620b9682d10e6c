#!/usr/bin/env bash
# On each trainer node: torchrun, a node's rank in the job being its rank in the step. Exit code AGAIN where it was ended.
set -uo pipefail
mkdir -p "$LOGS/pids"
ended='' binding=()
# Each rank on the cores next to its GPU.
if [ "${GPUS_PER_NODE:-0}" -gt 0 ] && command -v numactl >/dev/null; then binding=(--numa-binding=node); fi
trap 'ended=yes' TERM  # srun's and scancel's go to every process: torchrun passes it on, ranks save
"${VENV:+$VENV/bin/}python" -m torch.distributed.run --nnodes "$TRAINER_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$PROCESSES_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "${binding[@]}" --no-python bash "$MEGATRON_STARE/slurm/rank.sh" "$@"
code=$?
if [ -n "$ended" ]; then code=$AGAIN; fi
echo "$code" >"$LOGS/node_$SLURM_NODEID.exit"
exit "$code"
