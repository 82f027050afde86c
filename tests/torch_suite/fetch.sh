#!/bin/sh
# Fetches PyTorch's own tests: the folder test/ of Debian's source package `pytorch`, checked against Debian's signature.
# apt gets a configuration of its own below the target, so that the system's sources and lists stay as they are.
#
# usage: fetch.sh FOLDER [RELEASE]
set -eu

target=$1
release=${2:-trixie}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
[ -d "$target/test" ] && exit 0
command -v apt-get >/dev/null || {
    echo "PyTorch's tests come from Debian's source package, but this machine has no apt-get." >&2
    echo "Extract the folder test/ of PyTorch 2.6.0's source to $target/test yourself." >&2
    exit 2
}

mkdir -p "$target"
target=$(cd "$target" && pwd)
work=$target/apt
rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/package"
trap 'rm -rf "$work" "$target/unpacked"' EXIT
echo "deb-src $mirror $release main" > "$work/sources.list"
cat > "$work/apt.conf" <<CONFIGURATION
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
CONFIGURATION

export APT_CONFIG="$work/apt.conf"
apt-get update --quiet --quiet --error-on=any
(cd "$work/package" && apt-get source --quiet --quiet --download-only pytorch)
mkdir "$target/unpacked"
tar -xf "$work"/package/pytorch_*.orig.tar.xz -C "$target/unpacked" --strip-components=1 --wildcards 'pytorch-*/test'
mv "$target/unpacked/test" "$target/test"
