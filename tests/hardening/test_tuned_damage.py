"""Tuned files that are cut, garbled or read-only: calls go on with defaults, and nobody's file is lost."""

import copy
import errno
import json
import os
import warnings
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.ops import TunedConfigs
from ejkernel.ops.tuned_files import keep, unsaved, user_file

Q = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
BUCKET = "B1-T64-S64-H2-K2-D16-V16-float32-full"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The user's file, with a config for the call above."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    found = user_file("cpu")
    TunedConfigs().add("flash_attention", BUCKET, "xla", {"block_q": 16}, 100.0).save(found)
    return found


def told():
    """What the call would run, whatever is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return explain(flash_attention, Q, Q, Q)


def test_the_file_is_used(path):
    assert told().config.block_q == 16 and told().config_source != "default"


def test_cut_anywhere(path):
    """A half-written file of a version that did not write whole ones, or of a full disk."""
    whole = path.read_bytes()
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        found = told()
        assert found.platform == "xla" and found.config_source == "default", whole[:length]
        path.with_name(path.name + ".damaged").unlink(missing_ok=True)


ODD = (None, True, -1, 2**70, 1.5, "x", "", [], {}, [1], {"a": 1}, {"block_q": 0}, {"block_q": "8"}, {"nosuch": 4})


def places(node, at=()):
    """Every path into a document."""
    yield at
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*at, key))


@pytest.mark.parametrize("seed", range(3))
def test_garbled(path, seed):
    """One value of the document is something else: its file is set aside or its entry left out, and calls go on."""
    document, draw = json.loads(path.read_text()), Random(seed)
    for at in [at for at in places(document) if at]:
        changed = copy.deepcopy(document)
        node = changed
        for key in at[:-1]:
            node = node[key]
        node[at[-1]] = draw.choice(ODD)
        path.write_text(json.dumps(changed))
        assert told().platform == "xla", changed
        path.with_name(path.name + ".damaged").unlink(missing_ok=True)


def read_only(monkeypatch):
    """A file system on which nothing can be written; permissions would not stop a root."""

    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    opened = os.open

    def only_reading(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *args, **kwargs)

    for name in ("write_bytes", "write_text", "mkdir", "rename", "replace", "unlink", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    for name in ("rename", "replace", "remove", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", only_reading)


def test_read_only(path, monkeypatch):
    """What is there is used, what cannot be kept serves this process, and the warning says so."""
    before = path.read_bytes()
    more = TunedConfigs().add("flash_attention", "T1", "xla", {"block_q": 8}, 1.0)
    with monkeypatch.context() as patch:
        read_only(patch)
        assert told().config.block_q == 16
        with pytest.warns(UserWarning, match=r"could not be saved: .*Read-only file system"):
            keep(more, path)
        assert unsaved(path) == more
    assert path.read_bytes() == before
    keep(TunedConfigs(), path)  # writable again: what was kept back goes in
    assert TunedConfigs.load(path).find("flash_attention", "T1", "xla") == {"block_q": 8}


def test_damaged_and_read_only(path, monkeypatch):
    """A damaged file that cannot be moved aside stays where it is."""
    path.write_text("{")
    with monkeypatch.context() as patch:
        read_only(patch)
        with pytest.warns(UserWarning, match="unreadable"):
            assert TunedConfigs.load(path) == TunedConfigs()
        assert told().config_source == "default"
    assert path.read_text() == "{"


def test_a_call_with_a_damaged_file(path):
    path.write_text('{"schema": 1, "entries": [')
    q = np.ones((1, 8, 1, 8), np.float32)
    with pytest.warns(UserWarning, match="defaults are used"):
        out = flash_attention(q, q, q)
    np.testing.assert_allclose(out, q)
