# SPDX-License-Identifier: Apache-2.0
"""Run torchrun for the bash form of the launch scripts, without its 35 to 94 lines below the sentence of an error.

`LOGLEVEL=INFO` in the environment brings torchrun's log back.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str]) -> int:
    """Run torchrun; the status is that of the process that failed first, 128 + N if signal N ended it."""
    from torch.distributed import DistNetworkError, DistStoreError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args(list(argv)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return ended(rank, failure.exitcode)
    except SignalException as error:
        print(f"Stopped by {signal.Signals(error.sigval).name}.", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (AssertionError, ValueError) as error:  # of a flag of its own, or a variable
        print(f"error: torchrun cannot start with these flags ({error}): see torchrun --help", file=sys.stderr)
        return 2
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(
            f"error: the nodes did not meet ({first}): check that each runs this command and reaches the first one's "
            "address, and give another --master-port if that one is in use",
            file=sys.stderr,
        )
        return 2
    return 0


def ended(rank: int, exitcode: int) -> int:
    """Return the status for a process's end, and print what a killed one could not."""
    if exitcode in (_INTERRUPTED, -signal.SIGINT):
        if (rank, exitcode) != (0, _INTERRUPTED):  # that one says so itself, and which checkpoint there is
            print(f"Stopped: rank {rank} was interrupted.", file=sys.stderr)
        return _INTERRUPTED
    if exitcode >= 0:
        return exitcode
    name = signal.Signals(-exitcode).name
    hint = ", which the system does when memory runs out" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    return 128 - exitcode


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are `launch.`'s, and must not hide others of the same names
    sys.exit(main(sys.argv[1:]))
