"""A program to be used as `controller.ssh` that runs the command on this machine, or fails as ssh does, by the host's name."""

import stat
from pathlib import Path

PROGRAM = """#!/bin/sh
while :; do
    case "$1" in
    -T) shift ;;
    -o) shift 2 ;;
    -G)
        case "$2" in
        typo*) echo "hostname $2.invalid" ;;
        *) echo "hostname 127.0.0.1" ;;
        esac
        exit 0
        ;;
    *) break ;;
    esac
done
address=$1
shift
case "$address" in
nowhere*) echo "ssh: Could not resolve hostname $address: Name or service not known" >&2; exit 255 ;;
locked*) echo "root@$address: Permission denied (publickey)." >&2; exit 255 ;;
silent*) exec sleep 600 ;;
esac
echo "*** a login's banner ***" >&2
echo "a login's greeting"
SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
export SSH_CONNECTION
exec sh -c "$1"
"""


def make(directory: Path) -> str:
    """The path of the program."""
    path = directory / "ssh"
    path.write_text(PROGRAM)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
