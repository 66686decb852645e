#!/usr/bin/env bash
# Run `docker ARGS` on this machine's container engine: `scripts/engine.sh compose up --wait`.
#
# It is the Docker that answers here, or else podman. Where neither does, root on Debian gets
# one: Debian 13's Docker Engine, Buildx and Compose in a root file system and a mount namespace of
# their own, one for the whole machine.
# `scripts/engine.sh --stop` ends it, and the containers with it; images and volumes stay.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=/var/lib/pawl-engine
path=/usr/sbin:/usr/bin:/sbin:/bin

fail() {
    echo "pawl: $*" >&2
    exit 1
}

# The process id of our daemon, if it runs.
daemon() {
    local pid
    pid=$(cat "$engine/run/docker.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}

prepare() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "no container engine answers: start Docker (with Compose 2.24 or newer) or podman; one is prepared here for root on Debian only"
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -qq --yes debootstrap; } >&2
    [ -e "$engine/.whole" ] && return
    echo "pawl: preparing a container engine in $engine (a minute)" >&2
    rm -rf --one-file-system "$engine"
    debootstrap --variant=minbase --include=ca-certificates,netbase,iptables,docker.io,docker-cli,docker-compose,docker-buildx \
        trixie "$engine" >&2
    touch "$engine/.whole"
}

# The rest of this machine is at /host in there.
start() {
    prepare
    mkdir -p "$engine/host"
    cp /etc/resolv.conf "$engine/etc/resolv.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$engine/etc/ssl/certs/ca-certificates.crt"
    rm -f "$engine/run/docker.pid"
    R=$engine PATH=$path setsid unshare --mount --propagation private sh -ec '
        mount --bind "$R" "$R"
        for folder in proc sys dev tmp; do mount --rbind "/$folder" "$R/$folder"; done
        cd "$R"
        pivot_root . host
        exec dockerd --exec-opt native.cgroupdriver=cgroupfs' \
        >"$engine/var/log/dockerd.log" 2>&1 </dev/null &
    for _ in $(seq 100); do
        pid=$(daemon) && run docker info >/dev/null 2>&1 && return
        sleep 0.3
    done
    fail "the container engine does not start; the reason is in $engine/var/log/dockerd.log"
}

# Run a command beside the daemon, in this checkout, which is at its own path there too.
run() {
    nsenter --target "$pid" --mount --root -- env PATH=$path HOME=/root \
        sh -ec 'mountpoint -q "$0" || { mkdir -p "$0"; mount --bind "/host$0" "$0"; }; cd "$0"; exec "$@"' "$PWD" "$@"
}

if [ "${1-}" = --stop ]; then
    pid=$(daemon) && kill "$pid" && tail --pid="$pid" -f /dev/null
    exit 0
fi
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
    exec docker "$@"
elif podman info >/dev/null 2>&1; then
    exec podman "$@"
fi
pid=$(daemon) || start
run docker "$@"
