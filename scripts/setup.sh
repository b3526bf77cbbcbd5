#!/bin/bash
# Makes .venv with everything in it: uv, the locked packages, ourselves, CRIU; system packages where it may.
# Run again it does nothing unless one of its inputs changed. What it cannot add is one plain line, not a failure.
set -euo pipefail
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
uv_home=.cache/uv-venv
stamp=.venv/.grid-setup
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
# The caller's own settings for Python would leak into the environment that is being made.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_PYTHON UV_PROJECT_ENVIRONMENT CONDA_PREFIX
export UV_NO_PROGRESS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# Trust what the machine trusts: uv brings its own list of authorities, which knows no company proxy.
authorities=/etc/ssl/certs/ca-certificates.crt
if [ -z "${SSL_CERT_FILE:-}" ] && [ -r "$authorities" ]; then export SSL_CERT_FILE=$authorities; fi

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

inputs() {
  echo "$root"
  sha256sum scripts/setup.sh scripts/install_criu.sh requirements.lock pyproject.toml
}

up_to_date() {
  [ -x .venv/bin/grid ] && [ -x .venv/bin/python ] && [ -r "$stamp" ] && [ "$(cat "$stamp")" = "$(inputs)" ]
}

# ---- system packages -------------------------------------------------------------------------------------------------

may_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_lists_fetched=""
apt_install() {
  local log=.cache/apt.log options=(-y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3)
  export DEBIAN_FRONTEND=noninteractive
  if [ -z "$apt_lists_fetched" ] && ! timeout 300 apt-get "${options[@]}" -s install "$@" >"$log" 2>&1; then
    timeout 300 apt-get -qq -o Acquire::Retries=3 update >"$log" 2>&1 || true
    apt_lists_fetched=1
  fi
  timeout 600 apt-get "${options[@]}" install "$@" >>"$log" 2>&1 </dev/null
}

# Debian starts a service as soon as it is installed; we want sshd's program, not another open port.
policy=/usr/sbin/policy-rc.d
policy_is_ours=""
allow_services() {
  if [ -n "$policy_is_ours" ]; then rm -f "$policy"; fi
  policy_is_ours=""
}
trap allow_services EXIT
forbid_services() {
  if [ -e "$policy" ]; then return 0; fi
  policy_is_ours=1
  printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" || true
}

# program:package …
system_packages() {
  local missing=() names=() pair name had_sshd=1
  command -v sshd >/dev/null || had_sshd=""
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || { missing+=("$pair"); names+=("${pair#*:}"); }
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if may_apt; then
    say "adding system packages: ${names[*]}"
    # One that cannot be had must not keep the others out.
    forbid_services
    apt_install "${names[@]}" || for name in "${names[@]}"; do apt_install "$name" || true; done
    allow_services
    if [ -z "$had_sshd" ] && [ -d /run/systemd/system ]; then
      systemctl disable --quiet ssh.service ssh.socket 2>/dev/null || true
    fi
  fi
  for pair in "${missing[@]}"; do
    command -v "${pair%%:*}" >/dev/null && continue
    if may_apt; then
      say "left out: ${pair%%:*} (apt-get could not install ${pair#*:}; see .cache/apt.log)"
      complete=""
    else
      say "left out: ${pair%%:*} (needs root and apt-get; as root: apt-get install ${pair#*:})"
    fi
  done
}

# ---- Python ----------------------------------------------------------------------------------------------------------

find_python() {
  local name
  for name in python3.11 python3 python3.12 python3.13; do
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
    "$name" -c 'import sys; print(sys.executable)'
    return 0
  done
  fail "no Python 3.11, 3.12 or 3.13 found; install one (Debian: apt-get install python3) and run this again"
}

ensure_uv() {
  uv=$root/$uv_home/bin/uv
  if "$uv" --version >/dev/null 2>&1; then return 0; fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    local package
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if may_apt; then
      say "adding system package: $package (this Python has no ensurepip)"
      apt_install "$package" || true
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      if uv=$(command -v uv) && "$uv" --version >/dev/null 2>&1; then return 0; fi
      fail "this Python cannot make virtual environments; as root: apt-get install $package"
    fi
  fi
  say "fetching uv"
  rm -rf "$uv_home"
  "$python" -m venv "$uv_home"
  timeout 300 "$uv_home/bin/python" -m pip install --quiet --retries 5 'uv>=0.9,<1' && return 0
  if uv=$(command -v uv) && "$uv" --version >/dev/null 2>&1; then return 0; fi
  fail "uv could not be fetched (pip install uv); is the package index reachable?"
}

lock() {
  # hatchling and editables are what `pip install -e .` builds with: locked too, so that nothing unpinned is fetched.
  echo "# Every package with its hashes; made by \`make lock\` from pyproject.toml. Names no index: the machine's own is used."
  printf 'hatchling>=1.26\neditables\n' | "$uv" pip compile pyproject.toml - --group dev --universal --python-version 3.11 \
    --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet
}

python_packages() {
  if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    "$uv" venv --quiet --clear --python "$python" .venv
  fi
  say "installing the locked Python packages"
  timeout 1500 "$uv" pip install --quiet --python .venv/bin/python --require-hashes -r requirements.lock ||
    timeout 1500 "$uv" pip install --quiet --python .venv/bin/python --require-hashes -r requirements.lock ||
    fail "the locked packages could not be installed (see above)"
  # Our scripts carry the path of the environment: made anew where a tree was copied.
  "$uv" pip install --quiet --python .venv/bin/python --reinstall --no-deps --no-build-isolation -e . ||
    fail "the package itself could not be installed"
}

criu() {
  if .venv/criu/criu --version >/dev/null 2>&1; then return 0; fi
  if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
    say "left out: criu (packages are known for Debian on x86_64 only): processes are moved by relaunch, not live"
    return 0
  fi
  say "adding CRIU to .venv/criu"
  local try
  for try in 1 2; do
    if timeout 300 scripts/install_criu.sh .venv/criu >.cache/criu.log 2>&1; then return 0; fi
    sleep "$try"
  done
  say "left out: criu ($(tail -n 1 .cache/criu.log)): processes are moved by relaunch, not live"
  complete=""
}

# ---- all of it -------------------------------------------------------------------------------------------------------

if [ "${1:-}" = "--lock" ]; then
  mkdir -p .cache
  python=$(find_python)
  ensure_uv
  lock >.cache/requirements.lock && mv .cache/requirements.lock requirements.lock
  exit 0
fi
if [ "${1:-}" = "--bench" ]; then
  # The peers that only the bench measures against; what is lacking is left out there, and said.
  mkdir -p .cache
  complete=1
  system_packages redis-server:redis-server
  exit 0
fi
if up_to_date; then exit 0; fi

mkdir -p .cache
exec 9>.cache/setup.lock
if command -v flock >/dev/null; then flock -w 1800 9 || fail "another set-up has been running here for half an hour"; fi
if up_to_date; then exit 0; fi
[ -w "${HOME:-/nonexistent}" ] || export UV_CACHE_DIR=$root/.cache/uv

complete=1
# The children must not hold the lock longer than we do.
{
  system_packages sshd:openssh-server ssh:openssh-client ip:iproute2 tmux:tmux strace:strace jq:jq \
    nsenter:util-linux taskset:util-linux ps:procps
  python=$(find_python)
  ensure_uv
  python_packages
  criu
} 9>&-
if [ -n "$complete" ]; then inputs >"$stamp"; fi
say "ready: .venv/bin/grid"
