#!/usr/bin/env bash
# Runs the tests on this machine: launch/test.sh [arguments of pytest], such as
#     launch/test.sh                        the fast tests, in two processes
#     launch/test.sh -m slow                the slow ones
#     launch/test.sh tests/test_losses.py   one file
# Makes .venv and installs the test requirements first, where that was not done.
set -euo pipefail
# shellcheck source=launch/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ "${1:-}" = --help ]; then show_help; exit 0; fi
prepare_to_test
cd "$root"
# Tests of one xdist_group share a process, and so what they compile.
[ "$#" -gt 0 ] || set -- -n 2 --dist loadgroup
exec "$python" -m pytest "$@"
