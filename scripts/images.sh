#!/usr/bin/env bash
# Build Pawl's images with this machine's container engine: `scripts/images.sh [proxy] [trainer] [cpu]`,
# by default the first two. Each image gets two tags, the version and the version with git's revision, or
# only the tag IMAGE_TAG. Its name with the last tag, and its size in bytes, are printed.
# The build uses this machine's settings of pip: index, certificates, folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -nE 's/^__version__.*"(.+)"/\1/p' store/__init__.py)
revision=$(git rev-parse --short=12 HEAD)
created=$(git show --no-patch --format=%cI HEAD)
git diff --quiet HEAD || revision+=-dirty

given=$(mktemp -d /tmp/pawl-images.XXXXXX)
trap 'rm -rf "$given"' EXIT
options=(--build-arg "REVISION=$revision" --build-arg "CREATED=$created")
pip_settings=$(python3 -m pip config list 2>/dev/null || true)
pip_option() { # pip_option NAME: its value, of the environment or a file
    sed -nE "s/^(:env:|global)\.$1='(.*)'\$/\2/p" <<<"$pip_settings" | head -1
}
echo "[global]" >"$given/pip.conf"
for name in index-url extra-index-url proxy trusted-host; do
    value=$(pip_option "$name")
    # Containers cannot read a folder of this machine.
    case $value in "" | file:*) ;; *) echo "$name = $value" >>"$given/pip.conf" ;; esac
done
bundle=$(pip_option cert)
if [ -n "$bundle" ]; then
    cp "$bundle" "$given/ca"
    echo "cert = /run/secrets/ca" >>"$given/pip.conf"
    options+=(--secret "id=ca,src=$given/ca")
fi
options+=(--secret "id=pip,src=$given/pip.conf")

scripts/engine.sh --images "$(sed -nE 's/^FROM (python:\S+)$/\1/p' Dockerfile.proxy)"
[ $# -gt 0 ] || set -- proxy trainer
for image in "$@"; do
    file=Dockerfile.$image more=()
    if [ "$image" = cpu ]; then
        file=Dockerfile.trainer
        more=(--build-arg LOCK=trainer-cpu --label org.opencontainers.image.title=pawl-cpu)
        wheels=$(pip_option find-links)
        if [ -d "$wheels" ]; then
            cp -r "$wheels" "$given/wheels"
            more+=(--build-context "wheels=$given/wheels" --build-arg TORCH_INDEX=)
        fi
    fi
    name=pawl-$image:${IMAGE_TAG:-$version-g$revision}
    [ -n "${IMAGE_TAG-}" ] || more+=(--tag "pawl-$image:$version")
    BUILDAH_FORMAT=docker scripts/engine.sh build --file "$file" "${options[@]}" ${more[@]+"${more[@]}"} --tag "$name" .
    scripts/engine.sh image inspect --format "$name {{.Size}}" "$name"
done
