"""Runs a command in a process forked from one that has imported: `python -S -E ask_warm.py FOLDER PROGRAM WORD ...`.

`warm_crf.py` is the other side. It imports next to nothing, as it is started hundreds of times.
"""

import os
import socket
import sys
from json import dumps

HEAVY_VERBS = ("inspect", "train")

if __name__ == "__main__":
    folder, program, *arguments = sys.argv[1:]
    is_light = program == "crf" and not (arguments and arguments[0] in HEAVY_VERBS)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/light" if is_light else f"{folder}/heavy")
        request = dumps([program, arguments, os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109
        socket.send_fds(connection, [len(request).to_bytes(4)], [0, 1, 2])
        connection.sendall(request)
        said = connection.makefile().read().split()  # which process it is, and how that ended
        code = int(said[1]) if len(said) > 1 else 70
        sys.exit(code if code >= 0 else 128 - code)
