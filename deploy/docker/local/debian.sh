#!/bin/sh
# A base image with Python, made of Debian's packages, for machines that reach no registry of images: docker image wooly-debian.
# Needs root, mmdebstrap and a Docker engine. SUITE: bookworm (Python 3.11) unless told.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mmdebstrap --quiet --variant=apt --include=python3,python3-venv \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/* "$1"/var/log/*' \
    "${SUITE:-bookworm}" "$folder/image.tar"
docker import "$folder/image.tar" wooly-debian
