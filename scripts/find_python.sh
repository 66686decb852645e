#!/bin/sh
# Print the first Python 3.11 to 3.13 of this machine, which `make install` makes .venv with.
# Exit status: 0, or 1 with the reason if there is none. Set PYTHON to choose one yourself.
set -u

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Each candidate is run: pyenv's shims are on PATH for versions that are not selected, and fail.
first_fitting() {
    for candidate in "$@"; do
        if path=$(command -v "$candidate") && fits "$path"; then
            echo "$path"
            exit 0
        fi
    done
}

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" && exit 0
    echo "pawl: no $PYTHON here: install Python 3.11, or set PYTHON to the path of one" >&2
    exit 1
fi
first_fitting python3 python3.11 python3.12 python3.13
if command -v pyenv >/dev/null; then
    root=$(pyenv root)
    first_fitting "$root"/versions/3.11.*/bin/python "$root"/versions/3.12.*/bin/python \
        "$root"/versions/3.13.*/bin/python
fi
if command -v uv >/dev/null; then
    first_fitting "$(uv python find --no-python-downloads '>=3.11,<3.14' 2>/dev/null)"
fi
echo "pawl: no Python 3.11, 3.12 or 3.13 on PATH, nor in pyenv or uv: install Python 3.11, or run \`make install PYTHON=/path/to/it\`" >&2
exit 1
