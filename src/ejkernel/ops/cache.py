"""Where tuned configs are kept: JSON with a schema version, written atomically under a lock."""

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1

# operation -> bucket -> platform -> {"config": {...}, "microseconds": float}
Entries = dict[str, dict[str, dict[str, dict[str, Any]]]]


@dataclass(frozen=True)
class TunedConfigs:
    """Measured configs of one device kind.

    >>> from ejkernel.ops import TunedConfigs
    >>> tuned = TunedConfigs().add("flash_attention", "T1024", "xla", {"block_q": 512}, 120.0)
    >>> tuned.find("flash_attention", "T1024", "xla")
    {'block_q': 512}
    """

    entries: Entries = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TunedConfigs":
        """Read a file. A missing one is empty; a damaged or foreign one is set aside with a warning."""
        path = Path(path)
        try:
            text = path.read_text()
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            return cls._set_aside(path, str(error))
        try:
            return cls(_checked(json.loads(text)))
        except (ValueError, RecursionError) as error:
            return cls._set_aside(path, str(error))

    @classmethod
    def _set_aside(cls, path: Path, reason: str) -> "TunedConfigs":
        aside = path.with_name(path.name + ".damaged")
        try:
            path.replace(aside)
            kept = f"it is now {aside.name}"
        except OSError:
            kept = "it could not be moved"
        warnings.warn(f"tuned configs in {path} are unreadable ({reason}); {kept}, defaults are used", stacklevel=3)
        return cls()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Merge into the file at `path`: what another process wrote meanwhile is kept."""
        from filelock import FileLock

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            merged = TunedConfigs.load(path) | self
            scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            scratch.write_text(json.dumps({"schema": SCHEMA, "entries": merged.entries}, indent=1, sort_keys=True))
            os.replace(scratch, path)

    def __or__(self, other: "TunedConfigs") -> "TunedConfigs":
        """Both; where they disagree, `other` wins."""
        merged: Entries = {}
        for source in (self.entries, other.entries):
            for operation, buckets in source.items():
                for bucket, platforms in buckets.items():
                    merged.setdefault(operation, {}).setdefault(bucket, {}).update(platforms)
        return TunedConfigs(merged)

    def add(
        self, operation: str, bucket: str, platform: str, config: dict[str, Any], microseconds: float
    ) -> "TunedConfigs":
        entry = {"config": config, "microseconds": microseconds}
        return self | TunedConfigs({operation: {bucket: {platform: entry}}})

    def find(self, operation: str, bucket: str, platform: str) -> dict[str, Any] | None:
        """The fields of the measured config, or None."""
        entry = self.entries.get(operation, {}).get(bucket, {}).get(platform)
        return None if entry is None else entry["config"]

    def times(self, operation: str, bucket: str) -> dict[str, float]:
        """Measured microseconds by platform."""
        platforms = self.entries.get(operation, {}).get(bucket, {})
        return {platform: entry["microseconds"] for platform, entry in platforms.items()}


def _checked(document: Any) -> Entries:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"schema {found!r}, this version reads {SCHEMA}")
    entries = document.get("entries")
    well_formed = isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("config"), dict)
        and isinstance(entry.get("microseconds"), int | float)
        for buckets in entries.values()
        if isinstance(buckets, dict) or _malformed()
        for platforms in buckets.values()
        if isinstance(platforms, dict) or _malformed()
        for entry in platforms.values()
    )
    return entries if well_formed else _malformed()  # pyright: ignore[reportReturnType]


def _malformed() -> Any:
    raise ValueError("entries are not operation -> bucket -> platform -> {config, microseconds}")


def user_file(kind: str) -> Path:
    """The user's tuned file for a device kind."""
    folder = os.environ.get("EJKERNEL_CACHE_DIR")
    if folder is None:
        import platformdirs

        folder = platformdirs.user_cache_dir("ejkernel")
    return Path(folder) / "tuned" / f"{kind}.json"


def shipped_file(kind: str) -> Path:
    """The file that comes with the package for a device kind or architecture."""
    return Path(__file__).parent.parent / "data" / "tuned" / kind / "tuned.json"
