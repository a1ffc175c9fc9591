"""Writing files."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file at once; where that fails it is as it was, and nothing lies beside it.

    A link stays a link, to a file that is replaced; what is no file (a device, a pipe) is written to.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
