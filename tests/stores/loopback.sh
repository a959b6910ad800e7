#!/bin/sh
# Runs tests where no network is but the loopback interface: whatever would leave this machine fails.
#
#   tests/stores/loopback.sh [PYTEST ARGUMENT...]       without arguments: the tests of the bucket stores
#
# Linux only; it needs the right to make a network namespace, as root or by user namespaces.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [ $# -eq 0 ]; then
    set -- -q tests/stores/test_s3*.py tests/stores/test_gcs*.py tests/stores/test_bucket_ranks.py
fi
namespace="--net"
[ "$(id -u)" -eq 0 ] || namespace="--net --map-root-user"
# shellcheck disable=SC2086  # two options
exec unshare $namespace sh -euc '
    ip link set lo up
    if [ "$(ip -o link show up | wc -l)" -ne 1 ]; then
        echo "loopback: there is another interface" >&2
        exit 1
    fi
    if "$0" -c "import socket; socket.create_connection((\"192.0.2.1\", 80), 2)" 2>/dev/null; then
        echo "loopback: the network can be reached" >&2
        exit 1
    fi
    exec "$0" -m pytest "$@"' "$python" "$@"
