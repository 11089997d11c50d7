#!/usr/bin/env bash
# Sets up a virtual environment and runs every check and test that this machine can run.
# Arguments go to pytest: `scripts/test.sh tests/test_packaging.py`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
cd "$project"
# The benchmark's page is tested in a real browser where one is installed; a machine that only runs tests gets one, while
# the environment is made.
browser=""
if [[ "${CI:-}" == true && "$(id -u)" == 0 ]] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium; } >/tmp/sdonnx-chromium.log 2>&1 &
    browser=$!
fi
setup_venv export,benchmark,completion,docs,dev
bin="$venv/bin"
# Without compiled sources, each process that imports torch and diffusers compiles them for 10 s; images for containers
# often ask Python to write none.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$(cd "$venv" && pwd)/pycache}"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/python" scripts/check_language.py
"$bin/mypy" --num-workers 2
[[ -z "$browser" ]] || wait "$browser" ||
    echo "chromium could not be installed (/tmp/sdonnx-chromium.log): its tests are skipped"
if [[ "$runtime" == cuda ]]; then
    exec "$bin/python" -m pytest "$@"
elif (($# > 0)); then
    exec "$bin/python" -m pytest -m "not gpu" "$@"
fi
# A worker takes 2 GB of memory. Fast tests come first: they show most faults.
workers="$(nproc)"
parallel=(--numprocesses $((workers < 4 ? workers : 4)) --dist loadfile --no-loadscope-reorder)
"$bin/python" -m pytest "${parallel[@]}" -m "not gpu"
