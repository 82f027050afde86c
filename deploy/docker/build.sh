#!/bin/sh
# Builds images: deploy/docker/build.sh [NAME...] (default: all that need no GPU's libraries). From any folder.
#   BASE         image with Python 3.11 or 3.12 (default python:3.12-slim-bookworm)
#   TAG, PREFIX  of the images made (default: the version in the file VERSION; none)
#   TORCH_INDEX  address of PyTorch's CPU index, so that images do not hold the CUDA build
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

build wooly-python base.Dockerfile --build-arg BASE="${BASE:-python:3.12-slim-bookworm}"
for name in ${*:-router scheduler metering compiler operator executor-cpu client}; do
    case $name in
        nats | postgres) build "wooly-local-$name" "local/$name.Dockerfile" ;;
        executor-cpu | executor-rocm | client)
            build "${prefix}wooly-$name:$tag" "$name.Dockerfile" --build-arg TORCH_INDEX="${TORCH_INDEX:-}" ;;
        *) build "${prefix}wooly-$name:$tag" "$name.Dockerfile" ;;
    esac
done
