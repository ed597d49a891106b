#!/bin/sh
# Sets the project up in .venv: `sh tools/setup.sh` for running it, `sh tools/setup.sh --dev` for its tests as well.
# Needs Python 3.11 and a package index, nothing else; PYTHON=/path/to/python3.11 names one that is not on the PATH.
# Running it again brings .venv up to date with Pipfile.lock.
set -eu
cd -P "$(dirname "$0")/.."

fail() { echo "error: $1" >&2; exit 2; }

case "$*" in '' | --dev) ;; *) fail "tools/setup.sh takes no option but --dev, not $*" ;; esac

# Another environment that is active, or pip's settings for the user's own packages, are not meant for .venv.
unset VIRTUAL_ENV PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

# A .venv that was moved here, or left half made, is made again: pip's own script holds its path.
if ! { is_311 .venv/bin/python && grep -qsF "$PWD/.venv" .venv/bin/pip; }; then
    python=
    for candidate in ${PYTHON:-python3.11 python3 python}; do
        if is_311 "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || fail "none of ${PYTHON:-python3.11, python3, python} is Python 3.11; name one: PYTHON=/path/to/python3.11 sh tools/setup.sh"
    "$python" -m venv --clear .venv
fi

# pipenv lives beside the project's packages, not among them, and always means .venv, whatever else is active.
if [ ! -x .venv/pipenv/bin/pipenv ]; then
    .venv/bin/python -m venv .venv/pipenv
    .venv/pipenv/bin/python -m pip install --quiet "pipenv==2026.10.3"
fi
cat > .venv/bin/pipenv <<'END'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
unset VIRTUAL_ENV PIPENV_PIPFILE
PIPENV_IGNORE_VIRTUALENVS=1 PIPENV_VENV_IN_PROJECT=1 exec "$here/../pipenv/bin/pipenv" "$@"
END
chmod +x .venv/bin/pipenv

# torch first, and by pip: then pip's own settings count (a CPU wheel on disk, an extra index), and a CUDA build
# brings its CUDA libraries, which the lock leaves out.
torch=$(.venv/bin/python -c 'import json; print("torch" + json.load(open("Pipfile.lock"))["default"]["torch"]["version"])')
.venv/bin/python -m pip install "$torch"
# sync, not install: the lock's hash covers the machine's pip settings, so install would rewrite it elsewhere.
.venv/bin/pipenv sync "$@"

# The tests want Horovod too, where it can be had: compiling it takes some minutes.
if [ "$*" = --dev ] && ! .venv/bin/python -c 'import horovod.torch' 2>/dev/null; then
    if command -v g++ >/dev/null && command -v make >/dev/null; then
        sh tools/horovod.sh || echo 'Horovod did not compile: its tests will be skipped.' >&2
    else
        echo 'No g++ and make: Horovod is left out, and its tests will be skipped.' >&2
    fi
fi
echo 'Ready. For instance: .venv/bin/pipenv run ./launch.py --help'
