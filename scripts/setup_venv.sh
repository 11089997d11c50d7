# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes the virtual environment and installs the project into it.
#
#   SDONNX_VENV   where the environment is (default: .venv in the project)
#
# A machine whose driver runs CUDA 13 gets the `cuda` extra, any other `cpu`; an environment stays what it was made
# as. Without a GPU, PyTorch's CPU build saves gigabytes: set PIP_EXTRA_INDEX_URL to its index.
# No index is named here, so that the scripts work behind a mirror.
# `cuda` compiles our own kernels; where that fails, they are left out (docs/decisions/0141).

project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${SDONNX_VENV:-$project/.venv}"
# CUDA 13's oldest driver (CUDA Toolkit release notes, table "CUDA Toolkit and Minimum Required Driver Version").
cuda_driver=580

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}

supports_project() {  # PYTHON: is it 3.11 to 3.13?
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {  # prints the first Python that will do
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if supports_project "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "found $(python3 --version 2>&1 || true); expected Python 3.11, 3.12 or 3.13; install one, for instance python3.12"
}

runtime_for_machine() {  # prints `cuda` or `cpu`
    local driver
    if ! nvidia-smi -L >/dev/null 2>&1; then
        echo cpu
        return
    fi
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
    if [[ "${driver%%.*}" =~ ^[0-9]+$ && "${driver%%.*}" -lt $cuda_driver ]]; then
        echo "NVIDIA driver $driver is too old for CUDA 13; using the CPU; update it to $cuda_driver or newer" >&2
        echo cpu
        return
    fi
    echo cuda
}

create_venv() {  # makes the environment unless a working one is there, and records its kind
    local python output
    if ! { supports_project "$venv/bin/python" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1; then
        python="$(find_python)"
        if ! output="$("$python" -m venv "$venv" 2>&1)"; then
            printf '%s\n' "$output" >&2
            fail "$python cannot make the environment $venv; expected Python with its venv module; on Debian: apt install python3-venv"
        fi
    fi
    [[ -f "$venv/sdonnx-runtime" ]] || runtime_for_machine >"$venv/sdonnx-runtime"
}

files_of_installation() {  # prints the files that decide what is installed
    cd "$project"
    cat setup.cfg setup.py pyproject.toml requirements*.txt
    [[ "$runtime" != cuda ]] || cat kernels/{*.py,*.toml,Makefile,src/*,weights/*,sdonnx_kernels/*.py}
}

install_project() {  # EXTRAS LOG: installs the project and what the extras need
    "$venv/bin/python" -m pip install --no-input --no-compile --disable-pip-version-check --progress-bar off \
        -c "$project/requirements.txt" -e "${project}[$1]" >"$2" 2>&1
}

install_without_kernels() {  # EXTRAS LOG: does so without our own kernels, for an installation that failed with them
    [[ "$runtime" == cuda && "${SDONNX_KERNELS:-}" != 0 ]] || return
    mv "$2" "$venv/sdonnx-kernels.log"
    SDONNX_KERNELS=0 install_project "$1" "$2"
}

setup_venv() {  # EXTRAS: installs the project with these extras and the machine's runtime, unless it is there
    local extras stamp wanted log started note=""
    create_venv
    runtime="$(<"$venv/sdonnx-runtime")"
    extras="$runtime,$1"
    stamp="$venv/sdonnx-${extras//,/-}.stamp"
    wanted="$project $(files_of_installation | cksum)"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    log="$venv/sdonnx-install.log"
    started=$SECONDS
    printf 'Installing sdonnx[%s] into %s (minutes the first time; log in %s) ... ' "$extras" "$venv" "$log"
    if ! install_project "$extras" "$log"; then
        if ! install_without_kernels "$extras" "$log"; then
            printf 'failed\n'
            tail -n 15 "$log" >&2
            fail "the installation failed; its whole log is $log; run the command again once that is put right"
        fi
        note="our own kernels could not be compiled, so ONNX Runtime's are used; the reason is in $venv/sdonnx-kernels.log"
        note+="; once it is put right, $venv/bin/python -m pip install $project/kernels"
    fi
    printf 'done in %d s\n' $((SECONDS - started))
    [[ -z "$note" ]] || printf '%s\n' "$note" >&2
    echo "$wanted" >"$stamp"
}
