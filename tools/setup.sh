#!/bin/sh
# Sets the project up in .venv: `sh tools/setup.sh` for running it, `sh tools/setup.sh --dev` for its tests as well.
# Needs Python 3.11 to 3.14 and a package index, nothing else. It takes the newest Python that it finds on the PATH;
# PYTHON=/path/to/python3.13 names another. Running it again brings .venv up to date with Pipfile.lock.
set -eu
cd -P "$(dirname "$0")/.."

# Of Python 3: the torch of Pipfile.lock and all that is locked with it have wheels for these.
oldest=11
newest=14

fail() { echo "error: $1" >&2; exit 2; }

# After a command that installs packages has failed, in words of its own.
fail_to_install() {
    fail "not all packages are installed, see above. If no package index was reached: check the network, or name an\
 index by PIP_INDEX_URL=https://.../simple, a proxy by https_proxy. Then run sh tools/setup.sh again"
}

case "$*" in '' | --dev) ;; *) fail "tools/setup.sh takes no option but --dev, not $*" ;; esac

# Another environment that is active, or pip's settings for the user's own packages, are not meant for .venv.
unset VIRTUAL_ENV PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Prints x where $1 is a supported Python 3.x. It is run, since a command can be there without working: a shim of
# pyenv for a version that is not active, for instance.
minor_version() {
    "$1" - 2>/dev/null <<END
import sys
major, minor = sys.version_info[:2]
print(minor)
sys.exit(major != 3 or not $oldest <= minor <= $newest)
END
}

# Debian and Ubuntu have ensurepip, which venv needs, in a package of its own.
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Prints the newest supported Python of the commands named.
newest_of() {
    best= best_version=0 without_venv=
    for candidate in "$@"; do
        version=$(minor_version "$candidate") || continue
        if ! has_venv "$candidate"; then
            without_venv=${without_venv:-$version}
        elif [ "${version:-0}" -gt "$best_version" ]; then
            best=$candidate best_version=$version
        fi
    done
    if [ -n "$best" ]; then
        echo "$best"
    elif [ -n "$without_venv" ]; then
        fail "Python 3.$without_venv has no ensurepip, which a virtual environment needs;\
 on Debian or Ubuntu: apt install python3.$without_venv-venv"
    else
        fail "found no Python 3.$oldest to 3.$newest (tried: $*);\
 install one, or name one: PYTHON=/path/to/python3.$newest sh tools/setup.sh"
    fi
}

# A .venv that was moved here, or left half made, is made again: pip's own script holds its path. One of another
# supported Python stays, unless PYTHON names another version.
usable_venv() {
    version=$(minor_version .venv/bin/python) && grep -qsF "$PWD/.venv" .venv/bin/pip || return 1
    [ -z "${PYTHON:-}" ] || [ "$(minor_version "$PYTHON")" = "$version" ]
}

if ! usable_venv; then
    if [ -n "${PYTHON:-}" ]; then
        python=$(newest_of "$PYTHON")
    else
        python=$(newest_of python3.14 python3.13 python3.12 python3.11 python3 python)
    fi
    echo "Making .venv with $("$python" --version), $(command -v "$python")"
    "$python" -m venv --clear .venv
fi

# pip would compile 12,000 Python files, of which few are ever imported. Those are compiled below, or when they are.
export PIP_COMPILE=0

# pipenv lives beside the project's packages, not among them, and always means .venv, whatever else is active.
if [ ! -x .venv/pipenv/bin/pipenv ]; then
    .venv/bin/python -m venv --without-pip .venv/pipenv
    .venv/bin/python -m pip --python .venv/pipenv/bin/python install --quiet "pipenv==2026.10.3" || fail_to_install
fi
cat > .venv/bin/pipenv <<'END'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
unset VIRTUAL_ENV PIPENV_PIPFILE
PIPENV_IGNORE_VIRTUALENVS=1 PIPENV_VENV_IN_PROJECT=1 exec "$here/../pipenv/bin/pipenv" "$@"
END
chmod +x .venv/bin/pipenv

# torch by pip: then pip's own settings count (a CPU wheel on disk, an extra index). It comes first and alone, since
# pipenv checks the hashes of what it installs, not of what is there.
torch=$(.venv/bin/python -c 'import json; print("torch" + json.load(open("Pipfile.lock"))["default"]["torch"]["version"])')
.venv/bin/python -m pip install --no-deps "$torch" || fail_to_install
# sync, not install: the lock's hash covers the machine's pip settings, so install would rewrite it elsewhere.
.venv/bin/pipenv sync "$@" || fail_to_install
# What is still missing are the CUDA libraries of a CUDA build, which the lock leaves out.
.venv/bin/python -m pip install "$torch" || fail_to_install
PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c \
    'import matplotlib.pyplot, transformers.modeling_utils, lm_human_preferences.train_policy'
echo 'Ready. For instance: .venv/bin/pipenv run ./launch.py --help'
