# For scripts/setup and scripts/setup-vllm: a virtual environment, and pip in it, with errors that say what to do.
# $environment: its directory; $python: the interpreter that it is made of.

fail() { # message
    echo "error: $1" >&2
    exit 1
}

make_environment() { # once; one that was left half made is made again
    if [ -x "$environment/bin/python" ] && { [ -e "$environment/installed" ] || "$environment/bin/python" -m pip --version &>/dev/null; }; then
        return
    fi
    command -v "$python" >/dev/null || fail "there is no $python. Set PYTHON=/path/to/python3.11 (or newer)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Laminar needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11"
    echo "making $environment"
    rm -rf "$environment"
    "$python" -m venv "$environment" || { rm -rf "$environment"; fail "$python cannot make an environment (Debian: apt install python3-venv); or set PYTHON="; }
}

pip() { # arguments of pip; on failure one line that says what to do
    local log=$environment/pip.log
    for _ in once again; do # many packages: one download that breaks off must not be the end
        if "$environment/bin/python" -m pip "$@" --quiet --disable-pip-version-check >"$log" 2>&1; then return; fi
    done
    tail -n 15 "$log" >&2
    if grep -qiE 'No space left' "$log"; then
        fail "the disk is full: .venv needs about 2 GB, .venv-vllm 4 GB, pip's cache as much again (pip cache purge)"
    elif grep -qiE 'connection|timed out|Name or service|NameResolution|SSLError|ProxyError' "$log"; then
        fail "pip cannot reach its package index: check the network, or PIP_INDEX_URL for a mirror; then run this again"
    elif grep -q 'from versions: none' "$log"; then
        fail "pip's package index has no version of it, or cannot be reached: check the network, or PIP_INDEX_URL for a mirror; then run this again"
    elif grep -q 'No matching distribution' "$log"; then
        fail "no wheel for $("$environment/bin/python" --version) on $(uname -sm) (see above): remove $environment, set PYTHON=/path/to/python3.12 (or 3.11), run this again"
    fi
    fail "pip $* failed (see above); remove $environment and run this again"
}

pinned_torch() { # as pyproject.toml has it
    sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml
}
