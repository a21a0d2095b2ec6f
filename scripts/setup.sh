#!/usr/bin/env bash
# Makes or repairs the virtual environment .venv: `scripts/setup.sh [cuda12|cuda13]`. Called by `make setup`.
# PYTHON=/path/to/python picks the interpreter; without it one is looked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp="$venv/setup-done" # folder (or "unfinished"), accelerator, checksum of what was installed
readonly suitable='import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))'

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

stamp_line() { sed -n "$1p" "$stamp" 2>/dev/null || true; }

# Not named again, the accelerator stays what it was.
accelerator="${1:-$(stamp_line 2)}"
requirement_files=(requirements/dev.txt)
case "$accelerator" in
'' | cpu) accelerator=cpu ;;
cuda12 | cuda13) requirement_files+=("requirements/$accelerator.txt") ;;
*) fail "unknown accelerator '$accelerator'; expected cpu, cuda12 or cuda13" ;;
esac
checksum=$(cat "${requirement_files[@]}" pyproject.toml | cksum)

works() {
    "$venv/bin/python" -c "$suitable" 2>/dev/null &&
        "$venv/bin/python" -c 'import importlib.metadata, pip, pytest; importlib.metadata.version("pensieve-jax")' 2>/dev/null
}

# An unfinished set-up may have left half-written packages, and an environment that was moved doesn't work.
may_be_kept() {
    [ "$(stamp_line 1)" = "$PWD" ] && [ "$(stamp_line 2)" = "$accelerator" ] && works && made_with_wanted_python
}

made_with_wanted_python() {
    local base='import os, sys; print(os.path.realpath(sys.base_prefix))'
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -c "$base" 2>/dev/null)" = "$("$venv/bin/python" -c "$base")" ]
}

# A name on PATH may be a shim that only reports an error, so every candidate has to prove that it runs.
find_python() {
    local candidate
    local candidates=(python3.12 python3.13 python3.14 python3 python)
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    else
        for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python \
            /opt/homebrew/bin/python3.1[2-4] /usr/local/bin/python3.1[2-4]; do
            candidates+=("$candidate")
        done
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c "$suitable; import ensurepip, venv" >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

has_uv() { uv --version >/dev/null 2>&1; }

make_venv() {
    local python
    if python=$(find_python); then
        say "making $venv with $("$python" --version) ($python)"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    elif [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not a working Python 3.12, 3.13 or 3.14 with the modules venv and ensurepip"
    elif has_uv; then
        say "no Python 3.12 or newer found; uv brings one"
        rm -rf "$venv"
        uv venv --seed --python 3.12 "$venv" ||
            fail "uv found no Python 3.12 either, and could not download one."
    else
        fail "no Python 3.12, 3.13 or 3.14 with the modules venv and ensurepip found. Ways to get one:" \
            "  Debian, Ubuntu:  apt-get install python3.12 python3.12-venv (or the release's newer one)" \
            "  Fedora:          dnf install python3.12" \
            "  macOS:           brew install python@3.12" \
            "  pyenv:           pyenv install 3.12" \
            "  uv:              install uv, then run this again: it brings its own Python" \
            "or name one yourself: make setup PYTHON=/path/to/python3.12"
    fi
}

install() {
    local arguments=()
    local file
    for file in "${requirement_files[@]}"; do
        arguments+=(-r "$file")
    done
    if has_uv; then
        uv pip install --quiet --python "$venv/bin/python" "${arguments[@]}" && return
        say "uv could not install them; trying pip"
    fi
    # Somebody who watches sees pip's progress; a log doesn't need it.
    [ -t 1 ] || arguments+=(--quiet --progress-bar off)
    "$venv/bin/python" -m pip install --disable-pip-version-check "${arguments[@]}"
}

if may_be_kept; then
    if [ "$(stamp_line 3)" = "$checksum" ]; then
        say "$venv is ready ($("$venv/bin/python" --version), $accelerator)"
        exit 0
    fi
else
    make_venv
fi
printf '%s\n' unfinished "$accelerator" >"$stamp"
say "installing the pinned packages (some minutes the first time)"
install
say "installing this project in editable form"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
works || fail "the environment does not work; remove $venv and run this again"
printf '%s\n' "$PWD" "$accelerator" "$checksum" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done; to use it in this shell: source $venv/bin/activate"
