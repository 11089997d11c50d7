#!/usr/bin/env bash
# From a fresh machine to an image: sets up a virtual environment, then draws a caption with the trained sample pipeline.
# Arguments go to `sdonnx quickstart`; --help lists them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv export,benchmark
exec "$venv/bin/python" -m sdonnx quickstart "$@"
