# shellcheck shell=bash
# Messages, timed steps, errors. Sourced by the scripts; works in bash 3.2 (macOS) and later.

STEP=0      # the step that is running
STEPS=0     # how many there are; the script sets it
CHILD=""    # the pid of the step's command, while one runs

say() { printf '%s\n' "$*"; }

die() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  local line
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

stop_child() {
  if [ -n "$CHILD" ]; then
    kill -TERM "$CHILD" 2>/dev/null || true
    wait "$CHILD" 2>/dev/null || true
    CHILD=""
  fi
}

# A signal ends the running step at once: by default bash waits for the command first.
on_signal() {
  stop_child
  printf '\nInterrupted.\n' >&2
  exit "$1"
}
trap 'on_signal 130' INT
trap 'on_signal 143' TERM HUP

title() {
  STEP=$((STEP + 1))
  printf '[%d/%d] %s' "$STEP" "$STEPS" "$1"
}

# step TITLE LOG COMMAND...: runs a command with its output in LOG, and shows the elapsed time.
# Returns the command's exit code; the caller reports the failure.
step() {
  local title_text=$1 log=$2 started=$SECONDS code=0
  shift 2
  title "$title_text"
  "$@" >>"$log" 2>&1 </dev/null &
  CHILD=$!
  if [ -t 1 ]; then
    while kill -0 "$CHILD" 2>/dev/null; do
      printf '\r[%d/%d] %s ... %d s ' "$STEP" "$STEPS" "$title_text" "$((SECONDS - started))"
      sleep 0.5
    done
    printf '\r[%d/%d] %s' "$STEP" "$STEPS" "$title_text"
  fi
  wait "$CHILD" || code=$?
  CHILD=""
  if [ "$code" -eq 0 ]; then
    printf ' ... done in %d s\n' "$((SECONDS - started))"
  else
    printf ' ... FAILED after %d s\n' "$((SECONDS - started))"
  fi
  return "$code"
}

# A step that had nothing to do.
skipped() {
  title "$1"
  printf ' ... %s\n' "$2"
}
