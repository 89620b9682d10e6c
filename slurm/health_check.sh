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
python=${VENV:+$VENV/bin/}python
if ! "$python" -c '' 2>/dev/null; then
    fault "$python does not run; set VENV to an environment that all nodes see, or CONTAINER"
fi
# Gloo and servers listen at the address of the node's own name.
address=$(getent ahosts "$(hostname)" 2>/dev/null | awk 'NR == 1 { print $1 }')
case ${address:-none} in
    127.* | ::1 | none) if [ "${SLURM_NNODES:-1}" -gt 1 ] && [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
        fault "its name $(hostname) resolves to ${address:-no address}; correct /etc/hosts, or set GLOO_SOCKET_IFNAME"; fi ;;
esac

# Where no cgroup hides them, nvidia-smi shows other jobs' GPUs too.
case ${CUDA_VISIBLE_DEVICES:-} in [0-9]* | GPU-*) own=(--id="$CUDA_VISIBLE_DEVICES") ;; *) own=() ;; esac

# smi QUERY: one line of nvidia-smi for each GPU
smi() { timeout 60 nvidia-smi "${own[@]}" "--query-$1=$2" --format=csv,noheader,nounits 2>/dev/null; }

if [ "${GPUS_PER_NODE:-0}" -gt 0 ]; then
    driver=$(smi gpu driver_version | head -n 1)
    seen=$(smi gpu index | wc -l)
    if [ "$seen" -lt "$GPUS_PER_NODE" ]; then fault "nvidia-smi sees $seen GPUs, not $GPUS_PER_NODE; drain the node"; fi
    torch=$("$python" -c 'import torch; print(torch.cuda.device_count(), torch.version.cuda)' 2>/dev/null)
    if [ "${torch%% *}" != "$seen" ]; then
        fault "torch sees ${torch%% *} GPUs, not $seen; its CUDA is ${torch##* }, the driver ${driver:-unknown}: CUDA 13 needs driver 580 or newer"
    fi
    if smi gpu ecc.errors.uncorrected.volatile.total | grep -q '[1-9]'; then
        fault "a GPU counts uncorrected ECC errors; drain the node"
    fi
    if smi remapped-rows remapped_rows.pending | grep -qi -e yes -e '^1'; then
        fault "a GPU has memory rows to remap; reset it or drain the node"
    fi
    used=$(smi gpu memory.used | sort -n | tail -n 1)
    if [ "${used:-0}" -gt "${MOST_USED_MIB:-2048}" ]; then
        fault "$used MiB of a GPU are in use before the job starts; end the processes that nvidia-smi shows"
    fi
    if timeout 60 nvidia-smi -q 2>/dev/null | grep -A 2 '^ *Fabric$' | grep -q 'State *: In Progress'; then
        fault "NVLink's fabric is not ready; start nvidia-fabricmanager, of the driver's version"
    fi
    ports=("${SYSFS:-/sys}"/class/infiniband/*/ports/*)
    if [ -f "${ports[0]}/state" ] && [ "$(ulimit -l)" != unlimited ]; then
        fault "ulimit -l is $(ulimit -l), and InfiniBand pins memory; set LimitMEMLOCK=infinity in slurmd's unit"
    fi
    for port in "${ports[@]}"; do
        if [ -z "${NCCL_IB_HCA:-}" ] && [ -f "$port/state" ] && grep -q InfiniBand "$port/link_layer" && ! grep -q ACTIVE "$port/state"; then
            port=${port#*/infiniband/}
            fault "InfiniBand port ${port/\/ports\//:} is not active; name the other adapters in NCCL_IB_HCA, or drain the node"
        fi
    done
    # Triton compiles a launcher in C.
    if ! command -v "${CC:-gcc}" >/dev/null; then fault "no C compiler, which Triton needs; install gcc, or set CC"; fi
    if ! "$python" -c 'import sysconfig, os; raise SystemExit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null; then
        fault "no Python.h, which Triton needs; install python3-dev"
    fi
fi
exit $((faults > 0))
