#!/usr/bin/env bash
# An evaluation on a real GPU host: collects facts, correctness and figures into a folder. Usage: docs/guides/evaluate.sh [FOLDER]
# Needs a checkout with `make setup` done, two idle cores, and for the second part an NVIDIA GPU with a CUDA build of torch.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-evaluation-$(date +%Y%m%d-%H%M)}
mkdir -p "$out"
failed=0

step() { # NAME COMMAND...
    local name=$1
    shift
    echo "== $name: $*"
    if "$@" >"$out/$name.txt" 2>&1; then echo "   ok"; else echo "   FAILED ($?): see $out/$name.txt"; failed=1; fi
}

step commit git log -1 --oneline
step machine sh -c 'lscpu; free -g; uname -a'
if command -v nvidia-smi >/dev/null; then step nvidia nvidia-smi -q; fi
if command -v rocm-smi >/dev/null; then step amd rocm-smi --showallinfo; fi
step doctor .venv/bin/wooly doctor
step digits .venv/bin/wooly run examples/train_digits.py
step client .venv/bin/python bench/client.py
step sharing .venv/bin/python bench/sharing.py
step dispatch .venv/bin/python bench/dispatch.py
if command -v nvidia-smi >/dev/null; then step against-cuda tests/gpu/run.sh --json "$out/against-cuda.json"; fi
echo "results in $out"
exit $failed
