#!/bin/bash
# Train on the nodes of a Slurm allocation:
#   sbatch --nodes 4 --gpus-per-node 8 examples/cluster/slurm.sh config.yaml [KEY=VALUE …]
# The environment with rlsdk, the home folder and `out` must be on disks that all nodes mount.
#SBATCH --job-name rlsdk
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
#SBATCH --signal B:TERM@300
#SBATCH --open-mode append
set -euo pipefail

# The cluster runs any code sent to it, so each job has its own token.
folder=$(mktemp -d "$HOME/.rlsdk-job-$SLURM_JOB_ID-XXXXXX")
python -c 'import secrets; print(secrets.token_hex(32))' > "$folder/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token"
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_USAGE_STATS_ENABLED=0
export RAY_grpc_keepalive_timeout_ms=60000 RAY_grpc_client_keepalive_time_ms=60000

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="${nodes[0]}:${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
started=()
clean_up() {
    kill "${started[@]}" 2> /dev/null || true
    wait
    rm -rf "$folder"
}
trap clean_up EXIT

on() {  # on NODE COMMAND…: run a command on one node, in the background
    srun --overlap --nodes 1 --ntasks 1 --nodelist "$@" &
    started+=($!)
}

on "${nodes[0]}" ray start --head --port "${address##*:}" --include-dashboard false --block
until ray health-check --address "$address" > /dev/null 2>&1; do
    kill -0 "${started[0]}" || { echo "Ray did not start on ${nodes[0]}" >&2; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    on "$node" ray start --address "$address" --block
done
python - "$address" "${#nodes[@]}" << 'PYTHON'
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
end = time.monotonic() + 600
while (count := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[2]):
    if time.monotonic() > end:
        sys.exit(f"only {count} of {sys.argv[2]} nodes joined Ray within 600 s")
    time.sleep(1)
PYTHON

# At the time limit, the current step is finished and saved; resubmitting the same job continues the run.
rlsdk train "$@" placement.ray="$address" --resume &
driver=$!
trap 'kill -TERM "$driver"' TERM
status=0
wait "$driver" || status=$?
while kill -0 "$driver" 2> /dev/null; do  # a signal ends `wait` before the driver ends
    status=0
    wait "$driver" || status=$?
done
exit "$status"
