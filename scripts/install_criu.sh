#!/bin/bash
# Puts CRIU 4.2 with its own libraries into a private directory, from the Debian source this machine already uses.
# Nothing outside that directory changes. Bookworm's own CRIU (3.17) fails on kernels from 6.x on, and trixie's (4.1)
# cannot dump sockets on kernels from 6.16 on, so the program comes from forky and its libraries from trixie.
set -euo pipefail
umask 022

prefix=${1:?usage: install_criu.sh DIRECTORY}
fail() { echo "criu: $*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "packages are known for Linux on x86_64 only"
for tool in apt-get dpkg; do command -v "$tool" >/dev/null || fail "needs Debian's $tool"; done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || fail "Debian's archive keys are missing ($keys)"
sites() { apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "$@" | sort -u | grep -v security; }
# The origin is known only once lists were fetched; before that a Debian mirror is told by its path.
uri=$(sites 'Origin: Debian' | head -1) || uri=$(sites | grep -E '/debian/?$' | head -1) || true
[ -n "$uri" ] || fail "no Debian package source is set up here"

prefix=$(mkdir -p "$prefix" && cd "$prefix" && pwd -P)
new=$(mktemp -d "$prefix.XXXXXX")
work=$(mktemp -d)
trap 'rm -rf "$work" "$new"' EXIT
chmod 755 "$new"
mkdir -p "$work"/{lists/partial,cache/archives/partial}
printf "deb [signed-by=$keys] %s %s main\n" "$uri" trixie "$uri" forky >"$work/sources.list"
options=(
  -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$work/lists"
  -o Dir::Cache="$work/cache" -o APT::Get::List-Cleanup=0 -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=3
  -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30
)
packages=(criu/forky libcompel1/forky libnet9/forky libnl-3-200/forky)
for name in libc6 libbsd0 libgnutls30t64 libnftables1 libprotobuf-c1 libuuid1 libmd0 libp11-kit0 libidn2-0 libunistring5 \
  libtasn1-6 libnettle8t64 libhogweed6t64 libgmp10 libffi8 libmnl0 libnftnl11 libxtables12 libjansson4 libedit2 libtinfo6 \
  libcap2 libzstd1 zlib1g libbrotli1; do packages+=("$name/trixie"); done

cd "$work"
apt-get "${options[@]}" update || fail "the package lists of trixie and forky could not be fetched"
apt-get "${options[@]}" download "${packages[@]}" || fail "a package could not be fetched"
for deb in *.deb; do dpkg -x "$deb" "$new"; done
rm -rf "$new"/usr/share "$new"/etc "$new"/usr/lib/x86_64-linux-gnu/gconv

# The wrapper finds its libraries beside itself, so that the directory can be moved or copied as a whole.
cat >"$new/criu" <<'WRAPPER'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
lib=$here/usr/lib/x86_64-linux-gnu
exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$here/usr/sbin/criu" "$@"
WRAPPER
chmod 755 "$new/criu"
"$new/criu" --version >/dev/null || fail "the unpacked program does not run here"
rm -rf "$prefix"
mv -T "$new" "$prefix"
