"""Files that a command is to write: one that cannot be is refused before the work that would fill it."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile

import typer


def writable(path: Path | None) -> Path | None:
    """The path, with its folder made; a bad parameter where nothing can be written there."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise typer.BadParameter(f"{path} is a folder")
            with NamedTemporaryFile(dir=path.parent, prefix=path.name):  # as the file itself, which is replaced whole
                pass
        except OSError as error:
            raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return path


def drawable(path: Path | None) -> Path | None:
    """The path, where a picture can be written there; None, with a line that says why, where nothing can draw one."""
    if path is None:
        return None
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install matplotlib)", flush=True)
        return None
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in known:
        raise typer.BadParameter(f"{path}: the suffix {path.suffix!r} is none of {', '.join(known)}")
    return writable(path)
