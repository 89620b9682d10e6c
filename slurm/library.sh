# What the *.sbatch files share; sourced by them on the job's first node. README.md explains the variables.
# shellcheck shell=bash

MEGATRON_STARE=${MEGATRON_STARE:-$SLURM_SUBMIT_DIR}  # the checkout, on a disk that all nodes see
CONTAINER=${CONTAINER:-}                              # pyxis:IMAGE | apptainer:IMAGE; empty: none
SERVER_CONTAINER=${SERVER_CONTAINER:-$CONTAINER}      # the same for the servers
# The Python: an environment's, by default the checkout's, and `python` of the PATH where empty, as in a container.
if [ -n "$CONTAINER" ]; then VENV=${VENV:-}; else VENV=${VENV-$MEGATRON_STARE/.venv}; fi
if [ -n "$SERVER_CONTAINER" ]; then SERVER_VENV=${SERVER_VENV:-}; else SERVER_VENV=${SERVER_VENV-$VENV}; fi
MOUNTS=${MOUNTS:-$MEGATRON_STARE}                     # directories that a container sees, by commas
ROLLOUT_NODES=${ROLLOUT_NODES:-0}                     # nodes of this job, its last ones, that serve SGLang
COLOCATED=${COLOCATED:-0}                             # 1: every node trains and serves, on the same GPUs
GPUS_PER_SERVER=${GPUS_PER_SERVER:-}                  # empty: the run's own sglang.gpus_per_server
NODES_PER_SERVER=${NODES_PER_SERVER:-1}               # one server across several nodes
MAX_RESTARTS=${MAX_RESTARTS:-100}                     # requeues of this job
LOGS=${LOGS:-$MEGATRON_STARE/slurm-logs}/${SLURM_ARRAY_JOB_ID:-${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}/attempt_${SLURM_RESTART_COUNT:-0}
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-0}
SERVER_GPUS=${SERVER_GPUS:-$GPUS_PER_NODE}            # of a rollout node, where it is of another kind; and its cores
SERVER_CPUS=${SERVER_CPUS:-$SLURM_CPUS_ON_NODE}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}
LOST_SECONDS=${LOST_SECONDS:-90}                      # for the other nodes, when one has failed; torchrun takes 30
AGAIN=75  # exit code: stopped before the end, to be continued by the same command

export MEGATRON_STARE VENV LOGS GPUS_PER_NODE PROCESSES_PER_NODE GPUS_PER_SERVER NODES_PER_SERVER COLOCATED AGAIN
export PYTHONPATH=$MEGATRON_STARE${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { echo "$(date +%T) ${SLURM_JOB_NAME:-job} ${SLURM_JOB_ID:-}: $*" >&2; }

# prepare: which nodes do what, a port that is free, the logs' place, and a look at every node
prepare() {
    mkdir -p "$LOGS"
    mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
    servers=()
    on_trainers=() on_servers=()
    if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
        mapfile -t servers < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
        trainers=("${nodes[@]}")
        on_trainers=(--het-group=0) on_servers=(--het-group=1)
    else
        if [ "$ROLLOUT_NODES" -ge "${#nodes[@]}" ]; then
            say "ROLLOUT_NODES=$ROLLOUT_NODES leaves none of the job's ${#nodes[@]} nodes to train; ask for more with --nodes"
            exit 2
        fi
        trainers=("${nodes[@]:0:${#nodes[@]}-ROLLOUT_NODES}") servers=("${nodes[@]:${#nodes[@]}-ROLLOUT_NODES}")
        on_trainers=(--nodelist="$(joined , "${trainers[@]}")") on_servers=(--nodelist="$(joined , "${servers[@]}")")
    fi
    if [ "$COLOCATED" = 1 ]; then
        if [ ${#servers[@]} -gt 0 ] || [ "$NODES_PER_SERVER" -gt 1 ]; then
            say "COLOCATED=1 serves on the nodes that train; unset ROLLOUT_NODES and NODES_PER_SERVER, and submit one component" && exit 2
        fi
        servers=("${trainers[@]}") on_servers=("${on_trainers[@]}" --overlap)
    fi
    MASTER_ADDR=${trainers[0]} MASTER_PORT=$(free_port)
    export MASTER_ADDR MASTER_PORT TRAINER_NODES=${#trainers[@]}
    trainer_options=() trainer_command=() server_options=() server_command=()
    container trainer "$CONTAINER" && container server "$SERVER_CONTAINER"
    say "attempt ${SLURM_RESTART_COUNT:-0}; trainers: ${trainers[*]}; servers: ${servers[*]:-none}; logs: $LOGS"
    # In the job's container: its libraries must see the node's GPUs.
    on trainers "${trainer_options[@]}" "${trainer_command[@]}" bash "$MEGATRON_STARE/slurm/health_check.sh" || exit
    if [ ${#servers[@]} -gt 0 ] && [ "$COLOCATED$SERVER_CONTAINER" != "1$CONTAINER" ]; then
        VENV=$SERVER_VENV GPUS_PER_NODE=$SERVER_GPUS on servers "${server_options[@]}" "${server_command[@]}" \
            bash "$MEGATRON_STARE/slurm/health_check.sh" || exit
    fi
}

joined() { local IFS=$1 && shift && echo "$*"; }

# free_port: one that nothing listens on here; where to begin is the job's own
free_port() {
    local port
    for ((port = 20000 + SLURM_JOB_ID % 10000; ; port++)); do
        if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port" && return; fi
    done
}

# container NAME IMAGE: NAME_options of srun and NAME_command, the prefix of a command, that make it run in IMAGE. Pyxis
# unpacks an image on a node once, for the first step that names it.
container() {
    local -n options=$1_options command=$1_command
    local image=${2#*:} name
    options=() command=()
    case $2 in
        '') ;;
        pyxis:*)
            name=megatron_stare_$(cksum <<<"$image" | cut -d ' ' -f 1)
            options=(--container-image="$image" --container-name="$name" --container-workdir="$MEGATRON_STARE")
            options+=(--container-mounts="$(mounts :)") ;;
        apptainer:*)
            command=(apptainer exec --bind "$(mounts '')")
            if [ "$GPUS_PER_NODE" -gt 0 ]; then command+=(--nv); fi
            command+=("$image") ;;
        *) say "CONTAINER=$2 is neither pyxis:IMAGE nor apptainer:IMAGE; write one of them" && exit 2 ;;
    esac
}

# mounts SIGN: MOUNTS, each at the same place inside; pyxis wants it written twice
mounts() {
    local place places
    IFS=, read -r -a places <<<"$MOUNTS"
    for place in "${!places[@]}"; do places[place]+=${1:+$1${places[place]}}; done
    joined , "${places[@]}"
}

# on trainers|servers COMMAND...: one task on each of these nodes, with all that the node has
on() {
    local which=$1 count place=() cpus=$SLURM_CPUS_ON_NODE
    shift
    if [ "$which" = trainers ]; then
        count=${#trainers[@]} place=("${on_trainers[@]}")
    else
        count=${#servers[@]} place=("${on_servers[@]}") cpus=$SERVER_CPUS
    fi
    srun "${place[@]}" --mpi=none --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --cpus-per-task="$cpus" \
        --kill-on-bad-exit=1 "$@"
}

# run COMMAND ARGUMENTS...: `python -m megatron_stare COMMAND ARGUMENTS` on every rank of the trainers' nodes, next to
# the servers if there are any. The reason of its end decides how the job continues.
run() {
    local code=0
    prepare
    trap 'stop_and_save' USR1
    asked=''
    if [ ${#servers[@]} -gt 0 ]; then
        only_settings "$@"
        if [ "$COLOCATED" = 1 ]; then set -- "${@:1:2}" sglang.colocated=true sglang.sync_method=tensor "${@:3}"
        elif ask config "${settings[@]}" --only sglang.colocated | grep -q '^sglang.colocated=true'; then
            # a recipe for shared GPUs on separate ones
            set -- "${@:1:2}" sglang.colocated=false sglang.sync_method=broadcast policy.offload_while_generating=false "${@:3}"
        fi
        only_settings "$@"
        start_servers "${settings[@]}"
        # The trainer plans memory and time by the size that the servers have.
        local size=$((NODES_PER_SERVER > 1 && SERVER_GPUS > 0 ? NODES_PER_SERVER * SERVER_GPUS : GPUS_PER_SERVER))
        set -- "$@" "sglang.gpus_per_server=$size" rollout.engine=sglang "sglang.urls=[$(joined , "${urls[@]}")]"
    elif [ -d "$2" ]; then
        refuse_lost_servers "$@"
    fi
    on trainers "${trainer_options[@]}" "${trainer_command[@]}" bash "$MEGATRON_STARE/slurm/node.sh" "$@" &
    trainer=$!
    watched "$trainer" || code=$?
    stop_servers
    conclude "$code"
}

# only_settings COMMAND SOURCE WORDS...: `settings` are the source and its overrides, without options of the command such
# as --load latest-good
only_settings() {
    local word
    settings=("$2")
    for word in "${@:3}"; do case $word in -*) ;; *=*) settings+=("$word") ;; esac; done
}

# refuse_lost_servers COMMAND RUN WORDS...: config.yaml of a run names the servers of its last job, which ended with it
refuse_lost_servers() {
    local place places
    only_settings "$@"
    places=$(ask config "${settings[@]}" --only sglang.urls | sed -n "s/' *# config.yaml, .*//p" | grep -o '//[^"/]*' | tr -d '/[]')
    for place in $places; do
        if timeout 5 bash -c ": </dev/tcp/${place%:*}/${place##*:}" 2>/dev/null; then return; fi
    done
    if [ -n "$places" ]; then
        say "no server of sglang.urls in $2/config.yaml answers; set ROLLOUT_NODES or COLOCATED=1 for new ones, or give sglang.urls or rollout.engine=embedded" && exit 2
    fi
}

# run_alone COMMAND ARGUMENTS...: one process, on the job's first node
run_alone() {
    ROLLOUT_NODES=0
    prepare
    exec srun --mpi=none --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${trainer_options[@]}" "${trainer_command[@]}" \
        bash -c 'cd "$MEGATRON_STARE" && exec "${VENV:+$VENV/bin/}python" -u -m megatron_stare "$@"' megatron_stare "$@"
}

# serve_alone SOURCE OVERRIDES...: servers on all nodes of the job, their addresses in serve-JOB.urls, until it ends
serve_alone() {
    if [ -z "${SGLANG_API_KEY:-}" ]; then say "set SGLANG_API_KEY, and the same for the jobs that attach" && exit 2; fi
    trap 'stop_servers; exit' TERM
    prepare
    servers=("${trainers[@]}") on_servers=("${on_trainers[@]}")
    start_servers "$@"
    joined , "${urls[@]}" >"$SLURM_SUBMIT_DIR/$SLURM_JOB_NAME-$SLURM_JOB_ID.urls"
    wait "$server_step"
}

# watched PID: its exit code. srun would wait for ever for a node that was lost: once one node's ranks have failed, the
# others' are given LOST_SECONDS.
watched() {
    local deadline=''
    while kill -0 "$1" 2>/dev/null; do
        sleep 1 &
        wait $!
        if [ -z "$deadline" ] && grep -qsv '^0$' "$LOGS"/node_*.exit; then deadline=$((SECONDS + LOST_SECONDS)); fi
        if [ -n "$deadline" ] && [ "$SECONDS" -gt "$deadline" ]; then kill -KILL "$1"; fi
    done
    wait "$1"
}

# lost: the trainers' nodes that did not say how they ended
lost() {
    local number
    for ((number = 0; number < ${#trainers[@]}; number++)); do
        if [ ! -f "$LOGS/node_$number.exit" ]; then echo "${trainers[number]}"; fi
    done
}

# stop_and_save: the time limit is near, or a job of higher priority needs the nodes. Only ranks receive the signal: torchrun would
# give them no more than 30 seconds.
stop_and_save() {
    asked=yes
    say "asked to stop: saving"
    on trainers --overlap bash -c 'for file in "$LOGS"/pids/"$SLURMD_NODENAME".*; do kill -USR1 "$(cat "$file")"; done' || true
}

# ask COMMAND ARGUMENTS...: what `python -m megatron_stare COMMAND ARGUMENTS` prints, on the job's first node
ask() {
    local place=()
    case $CONTAINER in pyxis:*) place=(srun --mpi=none --nodes=1 --ntasks=1 "${trainer_options[@]}") ;; esac
    "${place[@]}" "${trainer_command[@]}" bash -c \
        'cd "$MEGATRON_STARE" && exec "${VENV:+$VENV/bin/}python" -m megatron_stare "$@"' megatron_stare "$@"
}

# size_servers SOURCE OVERRIDES...: GPUS_PER_SERVER as the run has it, and whether the model fits such a server
size_servers() {
    local plan
    if [ -z "$GPUS_PER_SERVER" ]; then
        GPUS_PER_SERVER=$(ask config "$@" --only sglang.gpus_per_server | sed -nE 's/^sglang\.gpus_per_server=([0-9]+).*/\1/p')
        if [ -z "$GPUS_PER_SERVER" ]; then
            say "sglang.gpus_per_server of $1 is not known; set GPUS_PER_SERVER to the GPUs of one server" && exit 2
        fi
    fi
    if [ "$SERVER_GPUS" -eq 0 ] || [ "$NODES_PER_SERVER" -gt 1 ]; then return; fi
    if [ $((SERVER_GPUS % GPUS_PER_SERVER)) -gt 0 ]; then
        say "GPUS_PER_SERVER=$GPUS_PER_SERVER does not divide the $SERVER_GPUS GPUs of a rollout node; set another number" && exit 2
    fi
    if ! plan=$(ask plan "$@" "sglang.gpus_per_server=$GPUS_PER_SERVER" --gpus "$((${#trainers[@]} * PROCESSES_PER_NODE))" \
        --rollout-gpus "$((COLOCATED == 1 ? 0 : ${#servers[@]} * SERVER_GPUS))" 2>&1); then
        # A fault of the trainer's own layout is the trainer's to refuse, which knows --force.
        if grep 'a server of' <<<"$plan" >&2; then say "set GPUS_PER_SERVER or sglang.gpus_per_server higher" && exit 2; fi
    fi
    # NCCL connects no two different versions; weights would go by way of host memory.
    if [ "$COLOCATED" != 1 ]; then
        ask doctor "$@" rollout.engine=sglang "sglang.urls=[]" 2>/dev/null | grep "^WARN *servers' NCCL" >&2 || true
    fi
}

# start_servers SOURCE OVERRIDES...: on the servers' nodes, in the background; `urls` are their addresses. Each serves
# at a fixed address, so that no process has to look it up.
start_servers() {
    size_servers "$@"
    local node number first=$((30000 + SLURM_JOB_ID % 100 * 16))
    local on_each=$((NODES_PER_SERVER > 1 || SERVER_GPUS == 0 ? 1 : SERVER_GPUS / GPUS_PER_SERVER)) options=()
    if [ $((${#servers[@]} % NODES_PER_SERVER)) -gt 0 ]; then
        say "${#servers[@]} rollout nodes cannot be shared out to servers of NODES_PER_SERVER=$NODES_PER_SERVER; change one of them" && exit 2
    fi
    urls=()
    for ((node = 0; node < ${#servers[@]}; node += NODES_PER_SERVER)); do
        for ((number = 0; number < on_each; number++)); do urls+=("http://${servers[node]}:$((first + number))"); done
    done
    # Servers refuse requests without the key.
    if [ -z "${SGLANG_API_KEY:-}" ]; then SGLANG_API_KEY=$(head -c 24 /dev/urandom | base64 | tr -dc 'A-Za-z0-9'); fi
    export SGLANG_API_KEY SERVER_NODES="${servers[*]}" SERVER_PORT=$first
    # Colocated servers see every GPU of their node, as the trainer's ranks do: both mean the same memory.
    if [ "$SERVER_GPUS" -gt 0 ] && [ "$COLOCATED" != 1 ]; then options=(--gpus-per-task=$((SERVER_GPUS / on_each))); fi
    VENV=$SERVER_VENV srun "${on_servers[@]}" --mpi=none --nodes="${#servers[@]}" --ntasks=$((${#servers[@]} * on_each)) --ntasks-per-node="$on_each" \
        --cpus-per-task=$((SERVER_CPUS / on_each)) "${options[@]}" --kill-on-bad-exit=0 --wait=0 \
        "${server_options[@]}" "${server_command[@]}" bash "$MEGATRON_STARE/slurm/server.sh" "$@" &
    server_step=$!
    say "servers: ${urls[*]}"
}

stop_servers() {
    if [ -z "${server_step:-}" ]; then return; fi
    touch "$LOGS/servers_end"
    for ((tries = 0; tries < 20; tries++)); do
        if ! kill -0 "$server_step" 2>/dev/null; then return; fi
        sleep 1
    done
    kill -TERM "$server_step" 2>/dev/null || true
}

# conclude CODE: the job's end, or its requeue: on a signal, after a hang, and where Slurm ended the ranks. Whatever
# failed by itself would fail again, so that it ends the job, its own first error last in the output.
conclude() {
    local code=$1
    if [ -n "$asked" ]; then requeue "stopped on a signal"; fi
    if grep -qsx "$AGAIN" "$LOGS"/rank_*.exit || grep -qs '^Timeout (' "$LOGS"/rank_*.log; then
        grep -hs -A 400 -e '^hang: ' -e '^Timeout (' "$LOGS"/rank_*.log | head -n 400 >&2
        requeue "the ranks hung"
    fi
    if [ "$code" -eq 0 ]; then say "done" && exit 0; fi
    if [ -n "$(lost)" ]; then requeue "lost: $(lost | tr '\n' ' ')"; fi
    if first_error; then exit "$code"; fi
    if [ "$code" -eq "$AGAIN" ]; then requeue "the ranks were ended"; fi
    say "the step ended with exit code $code; logs: $LOGS"
    exit "$code"
}

# first_error: name the rank that failed first, with the end of its log. A rank that raised has said when; of one that
# was killed its wrapper has, a moment late, so that it goes before those that raised up to 5 s earlier.
first_error() {
    local first time rank
    first=$({
        sed -nE 's/^failed: rank ([0-9]+) .* at ([0-9.]+): .*/\2 \2 \1/p' "$LOGS"/rank_*.log
        awk '{ printf "%.3f %s %s\n", $1 - 5, $1, $2 }' "$LOGS"/rank_*.killed
    } 2>/dev/null | sort -n | head -n 1)
    if [ -z "$first" ]; then first=$(awk '{ print $1, $1, $2 }' "$LOGS"/rank_*.ended 2>/dev/null | sort -n | head -n 1); fi
    if [ -z "$first" ]; then return 1; fi
    read -r _ time rank <<<"$first"
    say "rank $rank failed first, at $(date -d "@$time" +%T); the end of $LOGS/rank_$(printf %05d "$rank").log:"
    tail -n 40 "$LOGS/rank_$(printf %05d "$rank").log" >&2
}

# requeue WHY: this job again, in the same place; not where Slurm already sees to that, or someone cancelled it
requeue() {
    local state
    state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T 2>/dev/null | head -n 1)
    if [ "$state" != RUNNING ]; then say "$1; the job is ${state:-gone}, and not requeued from here" && exit "$AGAIN"; fi
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
        say "$1, and MAX_RESTARTS=$MAX_RESTARTS are used up; the same sbatch command continues the run" && exit "$AGAIN"
    fi
    say "$1; requeued"
    scontrol requeue "${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}"
    sleep 60  # Slurm ends this script
    exit "$AGAIN"
}
