"""Makes the program with which a member that is not root may lock memory: `lock_memory.py TARGET`, as root.

RDMA pins its buffers, which needs the capability IPC_LOCK or a limit that no pod can set. A pod may have the
capability, but Linux drops it when a process that is not root executes a program, unless the program's file has it too.
So TARGET is a copy of util-linux' `setpriv` whose file permits IPC_LOCK alone, and the executed program keeps it. In a
pod without IPC_LOCK the file permits nothing.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

_IPC_LOCK = 14  # CAP_IPC_LOCK of linux/capability.h
_REVISION_2 = 0x02000000  # VFS_CAP_REVISION_2 of the same, without the flag that makes it effective


def make(target: Path) -> None:
    """Make `target`.

    Raises:
        OSError: it cannot be written, or has no place for capabilities.
    """
    source = shutil.which("setpriv")
    if source is None:
        raise FileNotFoundError("setpriv of util-linux is not there; install util-linux")
    shutil.copy(source, target)
    target.chmod(0o755)
    os.setxattr(target, "security.capability", struct.pack("<IIIII", _REVISION_2, 1 << _IPC_LOCK, 0, 0, 0))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
