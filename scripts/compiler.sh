#!/usr/bin/env bash
# Puts the compilers for NVIDIA GPUs into .cache/aot, for the tests that compile kernels on a machine without
# one. Called by `make compiler`. Where they can't be had it says so and goes on: the tests then say that they
# were not run, and fail where CI is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=.venv/bin/python parts=.cache/aot requirements=requirements/aot.txt
readonly stamp="$parts/installed" # what was installed, and for which Python
wanted="$(cksum <"$requirements") $("$python" --version)"

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
echo "compiler: installing into $parts (about 400 MB to fetch)"
rm -rf "$parts.new"
if "$python" -m pip install --disable-pip-version-check --quiet --progress-bar off --no-deps \
    --target "$parts.new" -r "$requirements"; then
    printf '%s\n' "$wanted" >"$parts.new/installed"
    rm -rf "$parts"
    mv "$parts.new" "$parts"
else
    rm -rf "$parts.new"
    echo "compiler: could not be installed; kernels are not compiled in the tests"
fi
