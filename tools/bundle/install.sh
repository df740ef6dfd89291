#!/bin/sh
# Install LABInfer from this bundle into a virtual environment; needs no network and no compiler.
#
#   sh install.sh [FOLDER]            FOLDER is the environment to create (default: .venv here)
#   PYTHON=python3.11 sh install.sh   with another Python than python3
#
# The wheels are for Python @PYTHON@ on Linux, @MACHINE@.
set -eu
cd "$(dirname "$0")"
here=$PWD
cd "$OLDPWD"
folder=${1:-$here/.venv}
python=${PYTHON:-python3}

fail() {
    echo "install.sh: error: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "there is no $python; set PYTHON to a Python @PYTHON@"
found=$("$python" -c 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())')
[ "$found" = "@PYTHON@ @MACHINE@" ] || fail "$python is Python $found, and the wheels are for @PYTHON@ @MACHINE@; set PYTHON to such a Python"
(cd "$here" && sha256sum --check --quiet SHA256SUMS) || fail "a file of the bundle is missing or damaged; copy the bundle again"
"$python" -m venv "$folder" || fail "$python cannot create $folder; on Debian and Ubuntu install python@PYTHON@-venv"
"$folder/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --find-links "$here/wheels" "labinfer[mpi]==@VERSION@"
"$folder/bin/labinfer" --version
echo "installed in $folder; try: $folder/bin/labinfer --prompt \"17 + 25 = ?\""
