#!/usr/bin/env bash
# One node, before anything is started on it: one line for each thing that would end the job later, and exit code 1.
set -uo pipefail
faults=0
fault() { echo "$(hostname): $*" >&2 && faults=$((faults + 1)); }

# free DIRECTORY MEBIBYTES REMEDY
free() {
    local free
    free=$(df --output=avail --block-size=M "$1" 2>/dev/null | tail -n 1 | tr -dc 0-9)
    if [ -z "$free" ]; then fault "$1 is not there; $3"; elif [ "$free" -lt "$2" ]; then fault "$1 has $free MiB free, fewer than $2; $3"; fi
}

free "$LOGS" "${LEAST_DISK_MIB:-1024}" "make room, or set LOGS and run.dir to another disk"
free /dev/shm "${LEAST_SHM_MIB:-64}" "enlarge it: mount -o remount,size=... /dev/shm"
free "${TMPDIR:-/tmp}" 64 "make room"
if ! touch "$LOGS/.$(hostname)" 2>/dev/null; then fault "cannot write $LOGS; it must lie on a disk that every node can write"; fi
# The shared disk's own clock is the batch node's: a node that is far off spoils timestamps, logs and certificates.
skew=$(($(date +%s) - $(stat -c %Y "$LOGS/.$(hostname)" 2>/dev/null || date +%s)))
if [ "${skew#-}" -gt 5 ]; then fault "its clock and the shared disk's are $skew s apart; mend its time service"; fi
rm -f "$LOGS/.$(hostname)"
if [ "$(ulimit -n)" -lt 4096 ]; then fault "ulimit -n is $(ulimit -n), fewer than 4096; raise it (LimitNOFILE of slurmd)"; fi
if [ -z "${CONTAINER:-}" ] && ! "${VENV:+$VENV/bin/}python" -c '' 2>/dev/null; then
    fault "${VENV:+$VENV/bin/}python does not run; set VENV to an environment that all nodes see, or CONTAINER"
fi
if [ "${GPUS_PER_NODE:-0}" -gt 0 ]; then
    seen=$(timeout 60 nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)
    if [ "$seen" -lt "$GPUS_PER_NODE" ]; then fault "nvidia-smi sees $seen GPUs, not $GPUS_PER_NODE; drain the node"; fi
    if timeout 60 nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader 2>/dev/null | grep -q '[1-9]'; then
        fault "a GPU counts uncorrected ECC errors; drain the node"
    fi
fi
exit $((faults > 0))
