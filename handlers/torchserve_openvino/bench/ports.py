"""Finds free TCP ports of this machine. Standard library only: it runs before anything is installed.

As a program: `ports.py check 8080 8081 8082` prints the ports in use and exits 1; `ports.py free 3` prints three free
ones.
"""

from __future__ import annotations

import socket
import sys

HOST = "127.0.0.1"


def is_taken(port: int, host: str = HOST) -> bool:
    """Whether a process listens on `port`, or binding to it fails.

    Both checks are needed: on macOS a bind succeeds beside a listener on all addresses, and a port below 1024 refuses a
    bind without a listener.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        if probe.connect_ex((host, port)) == 0:
            return True
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_ports(count: int, host: str = HOST) -> list[int]:
    """`count` different ports that are free at this moment."""
    sockets = []
    try:
        for _ in range(count):
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            probe.bind((host, 0))
            sockets.append(probe)
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def main(arguments: list[str]) -> int:
    """Runs the program; returns its exit code."""
    command, *values = arguments
    if command == "free":
        print(*free_ports(int(values[0])))
        return 0
    taken = [value for value in values if is_taken(int(value))]
    print(*taken)
    return 1 if taken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
