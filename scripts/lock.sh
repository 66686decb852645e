#!/usr/bin/env bash
# Locks every role to exact versions: requirements/{proxy,litellm,trainer,cpu,gpu}.txt, the
# image with torch's and vLLM's CPU builds (trainer-cpu.txt), the serving role with its tests' tools
# (serving-tests.txt: `make serving`), and the clients that the tests drive (clients.txt, in an
# environment of their own).
# `cpu` is what `make install` installs without a GPU (all roles and the
# development tools); the others are held to its versions wherever they share a
# package. The files name no index, so that any mirror can serve them. What images and servers install
# has hashes; in `*cpu` and `gpu` torch's build, and so its hash, is the installer's choice.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
find_links=$(python3 -m pip config get global.find-links 2>/dev/null || true)

lock() { # lock FILE FIND_LINKS ARGS...
  local file=$1 links=$2
  shift 2
  lock_from pyproject.toml "$file" "$links" "$@"
}

lock_from() { # lock_from SOURCE FILE FIND_LINKS ARGS...
  local source=$1 file=$2 links=$3
  shift 3
  UV_FIND_LINKS=$links "$uv" pip compile "$source" "$@" --python-version 3.11 \
    --no-header --no-annotate --quiet -o "$file"
  # The local label is the installer's choice (`+cpu` from PyTorch's CPU index).
  sed -i -E 's/^(torch==[0-9.]+)\+cpu/\1/' "$file"
}

lock requirements/cpu.txt "${PIP_FIND_LINKS:-$find_links}" \
  --extra embedded --extra trainer --extra serve-cpu --extra demo --extra dev --group examples
lock requirements/trainer-cpu.txt "${PIP_FIND_LINKS:-$find_links}" -c requirements/cpu.txt \
  --extra trainer --extra serve-cpu --extra demo
# Nothing uses this GiB without a GPU.
sed -i '/^triton==/d' requirements/trainer-cpu.txt
# The CUDA build of torch wants a triton of its own.
shared=$(mktemp)
grep -v '^triton==' requirements/cpu.txt >"$shared"
lock requirements/proxy.txt "" -c "$shared" --extra otel --generate-hashes
lock requirements/serving-tests.txt "" -c "$shared" --extra serving-tests
# litellm is behind the others: openai < 3, huggingface-hub < 2, filelock < 4.
behind=$(mktemp)
grep -vE '^(openai|huggingface-hub|filelock|python-dateutil)==' "$shared" >"$behind"
lock requirements/litellm.txt "" -c "$behind" --extra litellm --generate-hashes
lock requirements/trainer.txt "" -c "$shared" --extra trainer --generate-hashes
lock requirements/gpu.txt "" --extra embedded --extra trainer --extra serve-gpu --extra demo --extra dev --group examples
# litellm asks for this week's version of certifi; any version will do here.
lock_from requirements/clients.in requirements/clients.txt "" --overrides <(echo "certifi>=2026")
