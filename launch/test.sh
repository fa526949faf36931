#!/usr/bin/env bash
# Runs the tests on this machine: launch/test.sh [arguments of pytest]
# Without arguments: the fast tests, in two processes. The slow ones: launch/test.sh -m slow
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

prepare_to_test
cd "$root"
# Tests of one xdist_group share a process, and so what they compile.
[ "$#" -gt 0 ] || set -- -n 2 --dist loadgroup
exec "$python" -m pytest "$@"
