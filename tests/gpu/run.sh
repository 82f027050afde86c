#!/usr/bin/env bash
# Compares "cuda" under Wooly with a real GPU: one command for a machine with an NVIDIA GPU, Python and torch.
# Needs no network if it is given a folder of wheels (`make gpu-wheels` collects them). Leaves nothing behind.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tests/gpu/run.sh [--wheels DIR] [--python PY] [--env DIR] [--truth cuda|cpu] [--json FILE]
                        [--samples N] [--jobs N] [--only PATTERN]... [--runtime cpu|cuda] [section...]

  --wheels DIR     take dependencies from this folder, not from the network (default: .gpu-wheels, if it exists)
  --python PY      an interpreter with torch (default: the first with torch of python3.12, 3.11, 3.13, 3.14, python3, python)
  --env DIR        keep the environment in this folder, and use it again if it exists (default: a temporary one)
  --runtime cuda   Wooly's side computes on the GPU, too, with the executor's CUDA runtime (default: on the CPU)
  --truth cpu      try the check without a GPU
  --json FILE      write the rows and all differences to FILE
  --samples N      samples per operator and dtype
  --jobs N         number of parallel processes
  --only PATTERN   groups of cases, such as 'mm' or 'nn.functional.*'
  section          operators autocast training facade errors compiled script, or runtime, or runtime:NAME with NAME of
                   facts bytes_to_and_fro library substitutes kernels interop complaints arguments events graphs
                   failed_captures drawn_graphs split_graphs moving_and_lent captures foreign_kernels foreign_walls speed
                   (default: all), or none: only prepare the environment
TEXT
}

fail() {
    echo "gpu check: $1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
wheels='' python='' kept='' truth=cuda options=() runtime=() only_runtime=() all=1
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --wheels | --python | --env | --truth | --json | --samples | --jobs | --only | --runtime)
            (($# > 1)) || fail "$1 needs a value; see --help"
            case $1 in
                --wheels) wheels=$2 ;;
                --python) python=$2 ;;
                --env) kept=$(realpath -m "$2") ;;
                --truth) truth=$2 ;;
                --json) options+=("$1" "$(realpath -m "$2")") ;;
                *) options+=("$1" "$2") ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; see --help" ;;
        runtime) only_runtime+=(all); all=0; shift ;;
        runtime:*) only_runtime+=("$1"); runtime+=("${1#runtime:}"); all=0; shift ;;
        *) options+=("$1"); all=0; shift ;;
    esac
done
[[ $truth == cuda || $truth == cpu ]] || fail "--truth must be cuda or cpu, not '$truth'"
[[ -n $wheels || ! -d $root/.gpu-wheels ]] || wheels=$root/.gpu-wheels
if [[ -n $wheels ]]; then
    compgen -G "$wheels/*.whl" >/dev/null || fail "there are no wheels in $wheels: collect them with 'make gpu-wheels' on a machine with a network"
    wheels=$(cd "$wheels" && pwd)
fi

# -- an interpreter with torch --------------------------------------------------------------------------------------------
fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}
has_torch() {
    "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null
}
if [[ -n $python ]]; then
    command -v "$python" >/dev/null || fail "the interpreter '$python' does not exist"
    fits "$python" || fail "$python is $("$python" --version 2>&1); Python 3.11 to 3.14 is required"
    has_torch "$python" || fail "$python has no torch: install it there, or name another interpreter with --python"
else
    for candidate in python3.12 python3.11 python3.13 python3.14 python3 python; do
        if command -v "$candidate" >/dev/null && fits "$candidate" && has_torch "$candidate"; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || fail "no Python 3.11 to 3.14 with torch was found (python3.11 to python3.14, python3, python): name one with --python"
fi
python=$("$python" -c 'import sys; print(sys.executable)')
"$python" - "$truth" <<'PY' || exit 2
import sys

def fail(text):
    print("gpu check:", text, file=sys.stderr)
    sys.exit(2)

try:
    import torch
except Exception as e:
    fail(f"{sys.executable} has a torch that cannot be imported: {type(e).__name__}: {e}")
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if not (2, 11) <= version <= (2, 15):
    print(f"gpu check: torch {torch.__version__}; Wooly is tested with 2.11 to 2.15", file=sys.stderr)
if sys.argv[1] == "cuda":
    if torch.version.cuda is None:
        fail(f"torch {torch.__version__} is a build without CUDA: install a build with CUDA, or try the check with --truth cpu")
    if not torch.cuda.is_available():
        fail(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: does nvidia-smi show one, is CUDA_VISIBLE_DEVICES "
             "set, is the driver recent enough? Or try the check with --truth cpu")
    try:
        torch.ones(2, device="cuda").sum().item()
    except Exception as e:
        fail(f"the GPU does not compute: {type(e).__name__}: {str(e).splitlines()[0]}")
PY

# -- a new environment on top of the interpreter's ----------------------------------------------------------------------
if [[ -n $kept ]]; then
    work=$kept
    mkdir -p "$work"
else
    work=$(mktemp -d "${TMPDIR:-/tmp}/wooly-gpu-env.XXXXXX")
    trap 'rm -rf "$work"' EXIT
fi
unset PYTHONPATH PYTHONHOME
ours=$work/env/bin/python
prepare() {
    "$python" -m venv --without-pip "$work/env" || fail "cannot make a virtual environment with $python"
    # Not --system-site-packages: if the interpreter is in a virtual environment, that option would skip its packages.
    "$python" -c 'import site; print("\n".join(site.getsitepackages()))' > \
        "$("$ours" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-the-machine.pth"
    "$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip: install it (on Debian or Ubuntu: apt-get install python3-pip)"
    # torch and its dependencies come from the machine.
    grep -vE '^(torch|numpy|scipy)==' "$root/constraints.txt" >"$work/constraints.txt"
    source=(-c "$work/constraints.txt")
    [[ -z $wheels ]] || source+=(--no-index --find-links "$wheels")
    pip install "${source[@]}" -r "$root/requirements/gpu.txt" ||
        fail "dependencies could not be installed${wheels:+ from $wheels (collected for another Python? make gpu-wheels GPU_PYTHON=3.11)}"
    pip install --no-index --no-deps --no-build-isolation --no-cache-dir \
        ./libs/wis ./libs/bus ./libs/dispatch ./libs/testkit ./libs/cuda-c ./libs/triton ./services/intercept ./services/router ./services/scheduler ./services/metering ./services/executor ./services/compiler ./deploy/local ||
        fail "Wooly's own packages could not be installed from $root"
    touch "$work/ready"
}
pip() {
    "$python" -m pip --python "$ours" --quiet --disable-pip-version-check "$@"
}
cd "$root"
[[ -e $work/ready ]] || prepare
# NVRTC comes with the interpreter's torch, where cuda.bindings does not look from the new environment.
if [[ -z ${CUDA_PATH:-} ]]; then
    found=$("$python" -c 'import importlib.util as u; s = u.find_spec("nvidia"); print(*(s.submodule_search_locations if s else ()), sep="\n")' |
        while read -r folder; do [[ ! -d $folder/cu13 ]] || echo "$folder/cu13"; done | head -n 1)
    [[ -z $found ]] || export CUDA_PATH=$found
fi
[[ " ${options[*]-} " != *" none "* ]] || exit 0

# -- the check ------------------------------------------------------------------------------------------------------------
# Another script runs the sections of the CUDA runtime (runtime, or runtime:NAME), even if the first script fails.
status=0
if ((! ${#only_runtime[@]})); then
    PYTHONPATH=tests/conformance "$ours" tests/gpu/check.py --truth "$truth" ${options[@]+"${options[@]}"} || status=$?
fi
if [[ $truth == cuda ]] && ((all || ${#only_runtime[@]})); then
    PYTHONPATH=services/compiler/tests/kernels "$ours" tests/gpu/runtime.py ${runtime[@]+"${runtime[@]}"} || status=$?
fi
exit "$status"
