#!/bin/sh
# Builds images: deploy/docker/build.sh [NAME...] (default: all). From any folder.
#   BASE         image with Python 3.11 to 3.14 (default python:3.12-slim-trixie)
#   TAG, PREFIX  of the images made (default: the version in the file VERSION; none)
#   TORCH_INDEX  address of PyTorch's CPU index, so that images for CPUs do not hold the CUDA build
#   ROCM_INDEX   address of PyTorch's ROCm index; without it, executor-rocm is left out
#   PIP_CONF, CA_FILE  a pip.conf and a PEM file for the build alone, as secrets; neither stays in an image
#   BUILD_ARGS   further arguments of docker build (such as --network host)
# Wheels that pip should prefer go into deploy/docker/wheels.
set -eu
cd "$(dirname "$0")/../.."
tag=${TAG:-$(cat VERSION)}
prefix=${PREFIX:-}
secrets=""
[ -z "${PIP_CONF:-}" ] || secrets="$secrets --secret id=pip,src=$PIP_CONF"
[ -z "${CA_FILE:-}" ] || secrets="$secrets --secret id=ca,src=$CA_FILE"

build() { # NAME DOCKERFILE [ARGS...]
    name=$1 file=$2
    shift 2
    # shellcheck disable=SC2086
    DOCKER_BUILDKIT=1 docker build ${BUILD_ARGS:-} $secrets -f "deploy/docker/$file" -t "$name" "$@" .
}

build wooly-python base.Dockerfile --build-arg BASE="${BASE:-python:3.12-slim-trixie}"
for name in ${*:-router scheduler metering compiler compiler-cuda compiler-rocm operator executor-cpu executor-cuda executor-rocm client}; do
    case $name in
        nats | postgres) build "wooly-local-$name" "local/$name.Dockerfile" ;;
        executor-cpu | client)
            build "${prefix}wooly-$name:$tag" "$name.Dockerfile" --build-arg TORCH_INDEX="${TORCH_INDEX:-}" ;;
        executor-rocm)
            if [ -n "${ROCM_INDEX:-}" ]; then
                build "${prefix}wooly-$name:$tag" "$name.Dockerfile" --build-arg TORCH_INDEX="$ROCM_INDEX"
            else
                echo "$name is left out: set ROCM_INDEX to the address of PyTorch's ROCm index, which pytorch.org names" >&2
                [ "$#" = 0 ] || exit 1 # it was asked for by name
            fi ;;
        compiler-cuda | compiler-rocm)
            build "${prefix}wooly-$name:$tag" compiler.Dockerfile --build-arg EXTRAS="[${name#compiler-}]" ;;
        *) build "${prefix}wooly-$name:$tag" "$name.Dockerfile" ;;
    esac
done
