"""The process in which answers that need algebra are compared (``python -m rl_tasks.math_worker``).

One JSON object per line in, one per line out; started and limited by `rl_tasks.math_pool`. The
answers are data for a grammar, and nothing of them is evaluated; a process of its own is for those
that run for very long or use all memory.
"""

import json
import os
import resource
import signal
import sys

_MEMORY_BYTES = 4 * 2**30
"""Address space: a tower of powers ends in a MemoryError and not in the machine's."""

_AFTER_THE_CALLER_S = 60
"""Seconds beyond its limit after which a comparison ends whose caller is not there any more."""


def main() -> None:
    """Answer requests until standard input ends."""
    import logging  # noqa: PLC0415

    from rl_tasks.math_equality import answers_are_equal, load_algebra  # noqa: PLC0415

    # what a library prints must not be taken for a reply
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
    load_algebra()  # outside the first answer's time
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we keep the time
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("{}", file=replies, flush=True)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.alarm(int(request["timeout_s"]) + _AFTER_THE_CALLER_S)
        reply: dict[str, bool | str]
        try:
            reply = {
                "equal": bool(
                    answers_are_equal(
                        request["answer"],
                        request["ground_truth"],
                        percent=request["percent"],
                        needs_algebra=True,
                    )
                )
            }
        except Exception as error:  # noqa: BLE001 - whatever a parser raises on a hostile answer
            reply = {"error": type(error).__name__}
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
