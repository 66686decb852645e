#!/usr/bin/env bash
# Run `docker ARGS` on this machine's container engine: `scripts/engine.sh compose up --wait`.
#
# The engine is Docker if it answers, else podman. If neither answers, this script makes one, for root
# on Debian: Debian 13's Docker Engine, Buildx and Compose in their own root file system and mount
# namespace, one for the whole machine. In it, this checkout and /tmp have their usual paths, and the
# rest of the machine is below /host.
#
# `scripts/engine.sh --images IMAGE...` pulls the missing images. Only in the engine made here, an image
# that cannot be pulled is replaced by a stand-in (scripts/stand_ins.Dockerfile).
# `scripts/engine.sh --stop` ends the engine made here, and its containers; images and volumes stay.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=/var/lib/pawl-engine
path=/usr/sbin:/usr/bin:/sbin:/bin
bundle=/etc/ssl/certs/ca-certificates.crt

fail() {
    echo "pawl: $*" >&2
    exit 1
}

# Print the process id of our daemon, if it runs. A zombie process has no namespace.
daemon() {
    local pid
    pid=$(cat "$engine/run/docker.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] &&
        [ -e "/proc/$pid/ns/mnt" ] && echo "$pid"
}

root_file_system() { # root_file_system FOLDER SUITE PACKAGES
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "no container engine or no image registry answers: start Docker (with Compose 2.24 or newer) or podman; only for root on Debian they are made here"
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -qq --yes debootstrap; } >&2
    rm -rf --one-file-system "$1"
    debootstrap --variant=minbase ${3:+--include="$3"} "$2" "$1" >&2
}

start() {
    if [ ! -e "$engine/.whole" ]; then
        echo "pawl: preparing a container engine in $engine (a minute)" >&2
        root_file_system "$engine" trixie ca-certificates,netbase,iptables,docker.io,docker-cli,docker-compose,docker-buildx
        touch "$engine/.whole"
    fi
    mkdir -p "$engine/host"
    cp /etc/resolv.conf "$engine/etc/resolv.conf"
    [ ! -e $bundle ] || cp $bundle "$engine$bundle"
    # Remove the leftovers of a killed engine.
    rm -rf "$engine"/run/docker "$engine"/run/docker.pid
    R=$engine PATH=$path setsid unshare --mount --propagation private sh -ec '
        mount --bind "$R" "$R"
        for folder in proc sys dev tmp; do mount --rbind "/$folder" "$R/$folder"; done
        cd "$R"
        pivot_root . host
        exec dockerd --exec-opt native.cgroupdriver=cgroupfs' \
        >"$engine/var/log/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 100); do
        pid=$(daemon) && beside docker info >/dev/null 2>&1 && return
        sleep 0.3
    done
    fail "the container engine does not start; the reason is in $engine/var/log/dockerd.log"
}

# Run a command in our daemon's namespaces.
beside() {
    nsenter --target "$pid" --mount --root -- env PATH=$path HOME=/root \
        sh -ec '
            # The checkout is not mounted yet, or another of this name replaced it.
            if ! [ "$0" -ef "/host$0" ]; then
                umount -l "$0" 2>/dev/null || true
                mkdir -p "$0"
                mount --bind "/host$0" "$0"
            fi
            cd "$0"
            exec "$@"' "$PWD" "$@"
}

stand_in() { # stand_in IMAGE
    local name=${1%%:*} suite=testing more=() python interpreter
    name=${name##*/}
    [ "$name" != python ] || suite=trixie
    grep -qE "^FROM \S+ AS $name\$" scripts/stand_ins.Dockerfile || fail "$1 cannot be pulled, and has no stand-in"
    echo "pawl: $1 cannot be pulled; making a stand-in" >&2
    if ! run image inspect "debian:$suite-slim" >/dev/null 2>&1; then
        local root
        root=$(mktemp -d "/tmp/pawl-debian-$suite.XXXXXX")
        root_file_system "$root" "$suite"
        rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/*
        tar --directory "$root" --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' --create . | run import - "debian:$suite-slim"
        rm -rf --one-file-system "$root"
    fi
    if [ "$name" = python ]; then
        # A copy of what the image needs: the engine would be sent all that is installed there.
        interpreter=$(mktemp -d /tmp/pawl-interpreter.XXXXXX)
        python=$(PYTHON=python3.11 scripts/find_python.sh)
        python=$("$python" -c 'import sys; print(sys.base_prefix)')
        chmod 755 "$interpreter"
        tar --directory "$python" --exclude=site-packages --exclude=test --exclude=tests --exclude=idlelib --exclude=tkinter \
            --exclude='*.a' --exclude=__pycache__ --create include lib bin/python3.11 | tar --directory "$interpreter" --extract
        # As in the image that it replaces, nothing is left of what debuggers read.
        ! command -v strip >/dev/null || find "$interpreter" -name '*.so*' -type f -exec strip --strip-unneeded {} +
        more=(--build-context "interpreter=$interpreter")
    fi
    run build --target "$name" ${more[@]+"${more[@]}"} --tag "$1" --file scripts/stand_ins.Dockerfile scripts
    rm -rf ${interpreter:+"$interpreter"}
}

if [ "${1-}" = --stop ]; then
    pid=$(daemon) && kill "$pid" && tail --pid="$pid" -f /dev/null
    exit 0
fi
# Prefix of this machine's paths, as the engine sees them.
outside=""
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
    run() { docker "$@"; }
elif podman info >/dev/null 2>&1; then
    [ "${1-}" != compose ] || podman compose version >/dev/null 2>&1 ||
        fail "podman has no Compose: install podman-compose, or start Docker with Compose 2.24 or newer"
    run() { podman "$@"; }
else
    outside=/host
    run() { beside docker "$@"; }
    pid=$(daemon) || start
fi
if [ "${1-}" = --images ]; then
    for image in "${@:2}"; do
        if run image inspect "$image" >/dev/null 2>&1; then
            continue
        elif [ -z "$outside" ]; then
            run pull "$image"
        else
            run pull "$image" 2>/dev/null || stand_in "$image"
        fi
    done
else
    run "$@"
fi
