"""The last stage of a sandbox: limits itself, then runs the code that it reads.

Started by its text (`python -I -S -c`) where neither the package nor its folder can be seen, so it
imports nothing of it.
"""

import json
import os
import resource
import sys
import traceback

STARTED = b"\x06"  # the first byte of output: the time limit begins


def main() -> None:
    """Run the program on stdin under the limits of sys.argv[1], JSON of RLIMIT_* to a number."""
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    for name, value in json.loads(sys.argv[1]).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir("/tmp")
    sys.argv = ["code"]
    os.write(1, STARTED)
    try:
        exec(compile(code, "code", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:  # without the frames of this file
        sys.stdout.flush()
        frames = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, frames, limit=-3, chain=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
