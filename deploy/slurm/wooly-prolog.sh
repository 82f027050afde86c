#!/bin/sh
# Slurm TaskProlog: what a job reserved of the generic resource `wooly_vram` becomes the client's variables.
#
#   slurm.conf:  GresTypes=wooly_vram      TaskProlog=/etc/slurm/wooly-prolog.sh
#   sbatch --gres=wooly_vram:8 ...         8 GiB of VRAM (one unit is one GiB)
#
# Slurm takes every line `export NAME=value` of the output into the task's environment, and shows `print ...` to the user.
# What the job sets itself (WOOLYAI_REQUIRED_VRAM) may be less than its reservation, never more.
# The file /etc/wooly/slurm.conf (sh) may set WOOLYAI_CONTROLLER_URL and WOOLYAI_NODE_GROUPS for all jobs.
set -eu

GRES=wooly_vram
GIB=1073741824

fail() {
    echo "print wooly: $1"
    # A value that the client refuses: the script ends with this line above its error instead of running without a reservation.
    echo "export WOOLYAI_REQUIRED_VRAM=$2"
    exit 0
}

# Units of the resource per node: from SLURM_JOB_GRES or SLURM_STEP_GRES, as gres:wooly_vram:8, wooly_vram:8 or wooly_vram=8.
units_of() {
    echo "$1" | tr ',' '\n' | sed -n "s#^\(gres[:/]\)\{0,1\}$GRES\(:[A-Za-z_][A-Za-z0-9_]*\)\{0,1\}[:=]\([0-9]\{1,7\}\)\((.*\)\{0,1\}\$#\3#p" | head -n 1
}

config=${WOOLY_SLURM_CONFIG:-/etc/wooly/slurm.conf}
WOOLY_URL=${WOOLYAI_CONTROLLER_URL:-}
# shellcheck disable=SC1090
[ ! -r "$config" ] || . "$config"
[ -n "$WOOLY_URL" ] || [ -z "${WOOLYAI_CONTROLLER_URL:-}" ] || echo "export WOOLYAI_CONTROLLER_URL=$WOOLYAI_CONTROLLER_URL"
[ -z "${WOOLYAI_NODE_GROUPS:-}" ] || echo "export WOOLYAI_NODE_GROUPS=$WOOLYAI_NODE_GROUPS"

units=$(units_of "${SLURM_STEP_GRES:-${SLURM_JOB_GRES:-}}")
[ -n "$units" ] || exit 0
[ "$units" -gt 0 ] || fail "--gres=$GRES:0 reserves nothing" none

reserved=$((units * GIB))
wanted=${WOOLYAI_REQUIRED_VRAM:-$reserved}
case $wanted in
    '' | *[!0-9]*) fail "WOOLYAI_REQUIRED_VRAM=$wanted is no number of bytes" "$wanted" ;;
esac
if [ "$wanted" -gt "$reserved" ]; then
    fail "WOOLYAI_REQUIRED_VRAM=$wanted is more than the $reserved bytes that --gres=$GRES:$units reserves" more-than-reserved
fi
echo "export WOOLYAI_REQUIRED_VRAM=$wanted"
