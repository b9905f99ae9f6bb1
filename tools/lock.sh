#!/usr/bin/env bash
# Write constraints*.txt, the versions that the project is developed and tested with: tools/lock.sh [--upgrade]
#
# uv resolves pyproject.toml with the extra `dev`, and requirements/*.in. Versions that are in the lists stay unless they
# no longer fit; with --upgrade all are the newest that fit. The lists name no index, so they hold for any.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || true)
[ -n "$uv" ] || uv=.venv-uv/bin/uv  # installed there by tools/environment.sh
[ -x "$uv" ] || { echo "lock.sh needs uv: pip install uv" >&2; exit 2; }

# PyTorch brings the CUDA libraries of its own build.
CUDA='^(nvidia|cuda|triton)'

lock() {
  local list=$1
  local source=$2
  shift 2
  local resolved
  resolved=$(mktemp)
  grep -v '^#' "$list" >"$resolved" || true
  "$uv" pip compile "$source" --output-file "$resolved" --quiet --python-version 3.11 --no-header --no-annotate "$@"
  {
    echo "# Written by make lock from $source."
    grep -Ev "$CUDA" "$resolved"
  } >"$list"
  rm "$resolved"
}

lock constraints.txt pyproject.toml --extra dev "$@"
for engine in verl skyrl vllm; do
  lock "constraints-$engine.txt" "requirements/$engine.in" --override requirements/overrides.in "$@"
done
