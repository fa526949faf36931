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
# Tests of one file share a process, and so what its fixtures compile: dealt out one by one, both
# processes would compile it. The longest files come first (tests/conftest.py).
[ "$#" -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
exec "$python" -m pytest "$@"
