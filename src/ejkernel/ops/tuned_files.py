"""Where tuned configs are kept: JSON with a schema version, written atomically under a lock."""

import json
import os
import re
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ejkernel.ops.files import write_whole

SCHEMA = 1

# operation -> bucket -> platform -> {"config": {...}, "microseconds": float, "training": float}
# config: None where the default one was measured
# microseconds: of a forward; training: of a forward and a backward, where there is one and it was measured
Entries = dict[str, dict[str, dict[str, dict[str, Any]]]]

# per size: how platforms compare further away than that is not known
MAX_DOUBLINGS = 4
# the head dims: a kernel for another one is another kernel, and its times and configs are its own
EXACT_SIZES = ("D", "V")
# by the same kernels, but what else differs is not known: they count as a doubling apart
ALIKE = {"float16": "bfloat16"}
# whose measurements serve the other devices of an architecture
MEASURED = {"sm_90": "nvidia_h200"}


class NewerSchema(RuntimeError):
    """A tuned file of a later version: not damaged, but nothing that this one may read or overwrite."""


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
        """Read a file. A missing one is empty; a damaged or foreign one is set aside with a warning.

        One of a later version is left where it is, with a warning.
        """
        try:
            return cls._read(Path(path))
        except NewerSchema as newer:
            warnings.warn(f"{newer}; it is left alone, defaults are used", stacklevel=2)
            return cls()

    @classmethod
    def _read(cls, path: Path) -> "TunedConfigs":
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            return cls._set_aside(path, str(error))
        try:
            document = json.loads(text)
            schema = document.get("schema") if isinstance(document, dict) else None
            if isinstance(schema, int) and schema > SCHEMA:
                raise NewerSchema(f"tuned configs in {path} have schema {schema}, this version reads {SCHEMA}")
            return cls(_checked(document))
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
        warnings.warn(f"tuned configs in {path} are unreadable ({reason}); {kept}, defaults are used", stacklevel=4)
        return cls()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Merge into the file at `path`: what another process wrote meanwhile is kept.

        `OSError` where it cannot be written, `RuntimeError` where it is of a later version: it is then as it was.
        """
        from filelock import FileLock

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock")):
            merged = TunedConfigs._read(path) | self
            write_whole(path, json.dumps({"schema": SCHEMA, "entries": merged.entries}, indent=1, sort_keys=True))

    def __or__(self, other: "TunedConfigs") -> "TunedConfigs":
        """Both; where they disagree, `other` wins."""
        merged: Entries = {}
        for source in (self.entries, other.entries):
            for operation, buckets in source.items():
                for bucket, platforms in buckets.items():
                    entries = merged.setdefault(operation, {}).setdefault(bucket, {})
                    for platform, entry in platforms.items():
                        if entry["config"] is None:  # a time alone leaves the config that was there
                            entry = {**entry, "config": entries.get(platform, entry)["config"]}
                        entries[platform] = entry
        return TunedConfigs(merged)

    def add(
        self,
        operation: str,
        bucket: str,
        platform: str,
        config: dict[str, Any] | None,
        microseconds: float,
        training: float | None = None,
    ) -> "TunedConfigs":
        entry: dict[str, Any] = {"config": config, "microseconds": microseconds}
        if training is not None:
            entry["training"] = training
        return self | TunedConfigs({operation: {bucket: {platform: entry}}})

    def find(self, operation: str, bucket: str, platform: str) -> dict[str, Any] | None:
        """The fields of the measured config, or None."""
        entry = self.entries.get(operation, {}).get(bucket, {}).get(platform)
        return None if entry is None else entry["config"]

    def times(self, operation: str, bucket: str, gradient: bool = False) -> dict[str, float]:
        """Measured microseconds by platform, of a forward, or of the backward after it.

        A backward is the time of both less the forward's, and counts as no shorter than the forward, since it does more
        work: a small difference of two times is noise. Where both took no longer than a forward, nothing was measured.
        """
        platforms = self.entries.get(operation, {}).get(bucket, {})
        forwards = {p: entry["microseconds"] for p, entry in platforms.items()}
        if not gradient:
            return forwards
        both = {p: entry.get("training", 0.0) for p, entry in platforms.items()}
        return {p: max(both[p] - one, one) for p, one in forwards.items() if both[p] > one}

    def nearest(self, operation: str, bucket: str, gradient: bool = False) -> tuple[int, str] | None:
        """The nearest bucket for which at least two platforms were measured, after the doublings to it."""
        compared = [name for name in self.entries.get(operation, {}) if len(self.times(operation, name, gradient)) > 1]
        near = [(apart, name) for name in compared if (apart := doublings(bucket, name)) is not None]
        return min(near, default=None)


@lru_cache(maxsize=1024)
def _parsed(bucket: str) -> tuple[dict[str, int], list[str]]:
    """Sizes by letter, and every other word."""
    words = bucket.split("-")
    sizes = {word[0]: int(word[1:]) for word in words if re.fullmatch(r"[A-Z]\d+", word)}
    return sizes, [word for word in words if not re.fullmatch(r"[A-Z]\d+", word)]


def doublings(bucket: str, other: str) -> int | None:
    """How many doublings lie between the sizes of two buckets; None where one says nothing about the other.

    >>> doublings("B2-T8192-D64-bfloat16-causal", "B1-T2048-D64-bfloat16-causal")
    3
    >>> doublings("B2-T8192-D64-bfloat16-causal", "B2-T8192-D64-bfloat16-full")
    >>> doublings("B2-T8192-D80-bfloat16-causal", "B2-T8192-D64-bfloat16-causal")
    >>> doublings("B2-T8192-D64-float16-causal", "B2-T8192-D64-bfloat16-causal")
    1
    """
    (sizes, words), (other_sizes, other_words) = _parsed(bucket), _parsed(other)
    alike = [[ALIKE.get(word, word) for word in of] for of in (words, other_words)]
    if alike[0] != alike[1] or sizes.keys() != other_sizes.keys():
        return None
    if any(sizes.get(letter) != other_sizes.get(letter) for letter in EXACT_SIZES):
        return None
    apart = {letter: abs(sizes[letter].bit_length() - other_sizes[letter].bit_length()) for letter in sizes}
    return None if max(apart.values(), default=0) > MAX_DOUBLINGS else sum(apart.values()) + (words != other_words)


def _checked(document: Any) -> Entries:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"schema {schema!r}, this version reads {SCHEMA}")
    entries = document.get("entries")
    well_formed = isinstance(entries, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("config", ""), dict | None)
        and _is_time(entry.get("microseconds"))
        and _is_time(entry.get("training", 0.0))
        for buckets in entries.values()
        if isinstance(buckets, dict) or _malformed()
        for platforms in buckets.values()
        if isinstance(platforms, dict) or _malformed()
        for entry in platforms.values()
    )
    return entries if well_formed else _malformed()  # pyright: ignore[reportReturnType]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _malformed() -> Any:
    raise ValueError("entries are not operation -> bucket -> platform -> {config, microseconds}")


# what could not be saved, by the file it belongs in: it serves this process
_UNSAVED: dict[Path, TunedConfigs] = {}


def keep(tuned: TunedConfigs, path: Path) -> None:
    """Save what was measured; where that fails, warn and keep it in memory."""
    tuned = unsaved(path) | tuned
    try:
        tuned.save(path)
        _UNSAVED.pop(path, None)
    except (OSError, NewerSchema) as error:
        _UNSAVED[path] = tuned
        warnings.warn(f"tuned configs could not be saved: {error}; they serve this process alone", stacklevel=2)


def unsaved(path: Path) -> TunedConfigs:
    """What belongs in a file that could not be written."""
    return _UNSAVED.get(path, TunedConfigs())


def user_file(kind: str) -> Path:
    """The user's tuned file for a device kind."""
    folder = os.environ.get("EJKERNEL_CACHE_DIR")
    if not folder:
        import platformdirs

        folder = platformdirs.user_cache_dir("ejkernel")
    return Path(folder) / "tuned" / f"{kind}.json"


def shipped_file(kind: str) -> Path:
    """The file that comes with the package for a device kind or architecture."""
    return Path(__file__).parent.parent / "data" / "tuned" / kind / "tuned.json"


def device_of(path: Path) -> str | None:
    """The device kind or architecture that a tuned file is for, where its place says so.

    >>> device_of(user_file("cpu")), device_of(shipped_file("nvidia_h200")), device_of(Path("run.json"))
    ('cpu', 'nvidia_h200', None)
    """
    path = path.absolute()
    if path.parent.name == "tuned":
        return path.stem
    return path.parent.name if path.name == "tuned.json" and path.parent.parent.name == "tuned" else None
