"""A child whose jobs go wrong in ways in which those of pegprof hardly ever do. Imports no jax."""

import os
import signal
import struct
import sys
import time

from pegprof.measure.worker.main import serve


def die_behind_a_process(request, reporter):
    """Of a process of its own, which has the socket too: so the socket does not end."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    reporter.update(found=1)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_in_a_message(request, reporter):
    """After the length of a message, which never comes."""
    os.write(int(sys.argv[1]), struct.pack("!i", 1000))
    time.sleep(600)


def answer(request, reporter):
    reporter.update(text=request["text"])


if __name__ == "__main__":
    serve({job.__name__: job for job in (die_behind_a_process, stop_in_a_message, answer)}.__getitem__)
