#!/usr/bin/env bash
# Sets up a virtual environment and runs every check and test that this machine can run.
# Arguments go to pytest: `scripts/test.sh tests/test_packaging.py`, `scripts/test.sh --weekly`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
cd "$project"
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
# The benchmark's page is tested in a real browser where one is installed; a machine that only runs tests gets one, while
# the environment is made.
browser=""
if [[ "${CI:-}" == true && "$(id -u)" == 0 ]] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium; } >"$logs/chromium" 2>&1 &
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
if [[ -n "$browser" ]] && ! wait "$browser"; then
    tail -n 5 "$logs/chromium"
    echo "chromium could not be installed: its tests are skipped"
fi
# mypy takes a core for minutes. Next to the tests, it takes what they leave: they wait for processes and for each other.
nice -n 15 "$bin/mypy" >"$logs/mypy" 2>&1 &
types=$!
# A worker takes 2 GB of memory. Fast tests come first: they show most faults.
parallel=()
if [[ "$runtime" == cpu ]] && (($# == 0)); then
    workers="$(nproc)"
    parallel=(--numprocesses $((workers < 4 ? workers : 4)) --dist loadfile --no-loadscope-reorder)
fi
status=0
[[ "$runtime" == cuda ]] || set -- -m "not gpu" "$@"
"$bin/python" -m pytest "${parallel[@]}" "$@" || status=$?
wait "$types" || status=$((status ? status : 1))
cat "$logs/mypy"
exit "$status"
