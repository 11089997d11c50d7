#!/usr/bin/env bash
# Sets up a virtual environment and runs every check and test that this machine can run.
# Arguments go to pytest: `scripts/test.sh tests/test_packaging.py`, `scripts/test.sh --full`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv export,benchmark,dev
cd "$project"
bin="$venv/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
selection=()
[[ "$runtime" == cuda ]] || selection=(-m "not gpu")
exec "$bin/python" -m pytest "${selection[@]}" "$@"
