#!/bin/bash
# Three servers of vLLM on one device: one of class P0, two of class P2 that hibernate while nobody asks them.
# The servers of one model store its weights once. Needs vLLM and wooly-vllm: docs/guides/serving.md.
#
#   wooly up
#   examples/serve_many.sh MODEL [OTHER_MODEL]
#
# CACHE, LENGTH and OPTIONS are passed to each server, for instance OPTIONS="--dtype float32" on a CPU, which computes slowly in
# bfloat16.
set -euo pipefail
model=${1:?usage: serve_many.sh MODEL [OTHER_MODEL]}
other=${2:-$model}
cache=${CACHE:-1G} # memory of each server's cache of keys and values
# The engine is a fork of its server, which has imported vLLM already. vLLM's command would start it as a new process, which
# imports all again: with three servers on two cores, that is a minute.
export VLLM_WORKER_MULTIPROC_METHOD=${VLLM_WORKER_MULTIPROC_METHOD:-fork}

serve() { # NAME PORT CLASS MODEL
    WOOLYAI_PRIORITY=$3 wooly run --quiet vllm serve "$4" --served-model-name "$1" --host 127.0.0.1 --port "$2" \
        --kv-cache-memory-bytes "$cache" --max-model-len "${LENGTH:-2048}" ${OPTIONS:-} &
}

trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
serve chat 8001 0 "$model"
serve batch 8002 2 "$model"
serve spare 8003 2 "$other"
for port in 8001 8002 8003; do
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
        kill -0 $(jobs -p) # a server that has ended, ends this script
        sleep 1
        ((SECONDS % 30)) || echo "port $port does not answer yet, after $SECONDS s (a new executor compiles kernels first)"
    done
    echo "port $port answers after $SECONDS s"
done
wooly top --once

# A hibernated session holds no memory of the device. The cluster's setting hibernate_after_s does this for all that are idle.
for session in $(wooly tasks --json | python3 -c '
import json, sys
for task in json.load(sys.stdin)["tasks"]:
    if task["state"] == "started" and task["priority"] == 2:
        print(task["task_id"])'); do
    wooly tasks hibernate "$session"
done
echo "chat, batch and spare answer on ports 8001 to 8003; batch and spare hibernate until their first request; Ctrl-C ends all"
wait
