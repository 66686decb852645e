#!/bin/sh
# Print the first Python 3.11 to 3.13 of this machine, which `make install` makes .venv with.
# Set PYTHON to choose one yourself: a program, or python3.12 for any Python of that version.
# Exit status: 0, or 1 with the reason if there is none.
set -u
versions="3.11 3.12 3.13"

fits() {
    # shellcheck disable=SC2086  # one argument a version
    "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' $versions \
        2>/dev/null
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

case ${PYTHON:-} in
    "") ;;
    python3.11 | python3.12 | python3.13)
        versions=${PYTHON#python}
        ;;
    *)
        command -v "$PYTHON" && exit 0
        echo "pawl: no $PYTHON here: install Python 3.11, or set PYTHON to the path of one" >&2
        exit 1
        ;;
esac
first_fitting python3
for version in $versions; do
    first_fitting "python$version"
done
if command -v pyenv >/dev/null; then
    for version in $versions; do
        first_fitting "$(pyenv root)/versions/$version".*/bin/python
    done
fi
if command -v uv >/dev/null; then
    for version in $versions; do
        first_fitting "$(uv python find --no-python-downloads "$version" 2>/dev/null)"
    done
fi
echo "pawl: no Python ($versions) on PATH, nor in pyenv or uv: install it, or name it, as in \`make install PYTHON=/path/to/it\`" >&2
exit 1
