#!/usr/bin/env bash
# Install into a Python environment, which is made if it is missing: tools/environment.sh FOLDER ARGUMENTS
#
# The arguments are those of `pip install`. uv installs them, in a third to a tenth of pip's time; where it is neither there nor on
# the index, or fails, pip does. PyTorch comes first, and always by pip: uv does not read pip's settings, by which a
# machine may name a wheel of its own.
set -euo pipefail

folder=$1
shift
python=$folder/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"
by_pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)

"${by_pip[@]}" "torch==2.13.0"
own=.venv-uv  # for all environments; not inside one, which has only what it needs
uv=$(command -v uv || true)
if [ -z "$uv" ] && { [ -x "$own/bin/uv" ] || "${by_pip[@]}" --target "$own" uv 2>/dev/null; }; then uv=$own/bin/uv; fi
if [ -n "$uv" ]; then
  "$uv" pip install --quiet --python "$python" "$@" && exit
  echo "== uv failed: pip installs instead"
fi
exec "${by_pip[@]}" "$@"
