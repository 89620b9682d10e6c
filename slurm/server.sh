#!/usr/bin/env bash
# One SGLang server, or one node's share of a server across several nodes; started again where it ends by itself.
set -uo pipefail
read -ra nodes <<<"$SERVER_NODES"
name=$LOGS/server_$(printf %05d "$SLURM_PROCID")
arguments=("$@" rollout.engine=sglang sglang.urls=[] sglang.num_servers=1 "sglang.port=$((SERVER_PORT + SLURM_LOCALID))")
arguments+=("sglang.host=${nodes[SLURM_NODEID]}" "run.dir=$name")
# Slurm has bound the task to its own GPUs, which are counted from 0 again; a colocated server has all of its node's.
arguments+=("sglang.first_gpu=$((COLOCATED == 1 ? SLURM_LOCALID * GPUS_PER_SERVER : 0))" "sglang.gpus_per_server=$((NODES_PER_SERVER > 1 ? 1 : GPUS_PER_SERVER))")
if [ "$NODES_PER_SERVER" -gt 1 ]; then
    first=$((SLURM_NODEID / NODES_PER_SERVER * NODES_PER_SERVER))
    across="--nnodes $NODES_PER_SERVER --node-rank $((SLURM_NODEID - first)) --dist-init-addr ${nodes[first]}:$((SERVER_PORT + 8))"
    arguments+=("sglang.server_args=${SERVER_ARGS:-} $across")
fi
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton_$UID}
cd "$MEGATRON_STARE" || exit
while true; do
    "${VENV:+$VENV/bin/}python" -u -m megatron_stare serve "${arguments[@]}" >>"$name.log" 2>&1 &
    server=$!
    while kill -0 "$server" 2>/dev/null; do
        # srun's own signal would be SIGKILL: the end is a file
        if [ -f "$LOGS/servers_end" ]; then kill -TERM "$server" && wait "$server" && exit; fi
        sleep 1
    done
    wait "$server"
    code=$?
    # A setting that cannot work is not tried again.
    if [ "$code" -eq 2 ]; then tail -n 5 "$name.log" >&2 && exit "$code"; fi
    sleep 5
done
