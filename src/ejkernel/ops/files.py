"""Writing files."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file at once; where that fails it is as it was, and nothing lies beside it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
