"""TunedConfigs: saved atomically under a lock, merged, and tolerant of damage."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from ejkernel.ops import TunedConfigs
from ejkernel.ops.files import write_whole
from ejkernel.ops.tuned_files import SCHEMA, keep, unsaved

ONE = TunedConfigs().add("flash_attention", "T64", "xla", {"block_q": 8}, 120.0)
TWO = TunedConfigs().add("flash_attention", "T64", "triton", {"block_m": 64}, 30.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "er" / "cpu.json"


def test_a_missing_file_is_empty(path):
    assert TunedConfigs.load(path) == TunedConfigs()
    assert not path.parent.exists()


def test_save_and_load(path):
    ONE.save(path)
    assert TunedConfigs.load(path) == ONE
    assert TunedConfigs.load(str(path)) == ONE
    document = json.loads(path.read_text())
    assert document["schema"] == SCHEMA
    assert document["entries"]["flash_attention"]["T64"]["xla"] == {"config": {"block_q": 8}, "microseconds": 120.0}


def test_find_and_times():
    both = ONE | TWO
    assert both.find("flash_attention", "T64", "xla") == {"block_q": 8}
    assert both.find("flash_attention", "T64", "pallas") is None
    assert both.find("flash_attention", "T128", "xla") is None and both.find("other", "T64", "xla") is None
    assert both.times("flash_attention", "T64") == {"xla": 120.0, "triton": 30.0}
    assert both.times("other", "T64") == {}


def test_merging_keeps_both_and_the_right_one_wins():
    newer = TunedConfigs().add("flash_attention", "T64", "xla", {"block_q": 16}, 90.0)
    merged = ONE | TWO | newer
    assert merged.find("flash_attention", "T64", "xla") == {"block_q": 16}
    assert merged.find("flash_attention", "T64", "triton") == {"block_m": 64}
    assert ONE.find("flash_attention", "T64", "xla") == {"block_q": 8}  # untouched


def test_a_time_alone_leaves_the_config_that_was_there():
    timed = TunedConfigs().add("flash_attention", "T64", "xla", None, 100.0)
    assert (ONE | timed).find("flash_attention", "T64", "xla") == {"block_q": 8}
    assert (ONE | timed).times("flash_attention", "T64") == {"xla": 100.0}
    assert (timed | ONE) == ONE and timed.find("flash_attention", "T64", "xla") is None


def test_a_time_alone_is_saved(path):
    timed = TunedConfigs().add("flash_attention", "T64", "xla", None, 100.0)
    timed.save(path)
    assert TunedConfigs.load(path) == timed


def compared(*buckets):
    """Buckets for which two platforms were measured."""
    tuned = TunedConfigs()
    for bucket in buckets:
        tuned = tuned.add("op", bucket, "xla", None, 2.0).add("op", bucket, "triton", None, 1.0)
    return tuned


@pytest.mark.parametrize(
    ("bucket", "nearest"),
    {
        "B2-T8192-H16-D64-bfloat16-causal": (0, "B2-T8192-H16-D64-bfloat16-causal"),
        "B4-T8192-H8-D64-bfloat16-causal": (2, "B2-T8192-H16-D64-bfloat16-causal"),
        "B8-T1024-H16-D64-bfloat16-causal": (1, "B8-T2048-H16-D64-bfloat16-causal"),
        "B8-T128-H16-D64-bfloat16-causal": (4, "B8-T2048-H16-D64-bfloat16-causal"),
        "B8-T64-H16-D64-bfloat16-causal": None,  # more than 16 times shorter
        "B2-T8192-H16-D128-bfloat16-causal": None,
        "B2-T8192-H16-D64-float16-causal": (1, "B2-T8192-H16-D64-bfloat16-causal"),
        "B2-T8192-H16-D64-float32-causal": None,
        "B2-T8192-H16-D64-bfloat16-causal-ragged": None,
        "B2-T8192-H16-D64-bfloat16-full": None,
        "B2-T8192-H16-D64-bfloat16-causal-bias": None,
        "B2-T8192-D64-bfloat16-causal": None,
        "bfloat16/chunk32/width64": None,
    }.items(),
    ids=str,
)
def test_nearest(bucket, nearest):
    tuned = compared("B8-T2048-H16-D64-bfloat16-causal", "B2-T8192-H16-D64-bfloat16-causal")
    assert tuned.nearest("op", bucket) == nearest
    assert tuned.nearest("other", bucket) is None


def test_one_platform_is_no_comparison():
    tuned = compared("B8-D64").add("op", "B1-D64", "xla", None, 1.0)
    assert tuned.nearest("op", "B1-D64") == (3, "B8-D64")


def test_saving_merges_with_what_is_there(path):
    ONE.save(path)
    TWO.save(path)
    assert TunedConfigs.load(path) == ONE | TWO


def test_nothing_is_left_beside_the_file(path):
    ONE.save(path)
    assert {p.name for p in path.parent.iterdir()} <= {path.name, path.name + ".lock"}


DAMAGE = {
    "empty": "",
    "cut-short": '{"schema": 1, "entries": {"flash',
    "not-json": "hello",
    "a-list": "[]",
    "a-number": "3",
    "no-schema": '{"entries": {}}',
    "older-schema": '{"schema": 0, "entries": {}}',
    "no-entries": '{"schema": 1}',
    "entries-list": '{"schema": 1, "entries": []}',
    "buckets-list": '{"schema": 1, "entries": {"flash_attention": []}}',
    "platforms-number": '{"schema": 1, "entries": {"flash_attention": {"T64": 3}}}',
    "no-config": '{"schema": 1, "entries": {"flash_attention": {"T64": {"xla": {"microseconds": 1.0}}}}}',
    "no-time": '{"schema": 1, "entries": {"flash_attention": {"T64": {"xla": {"config": {}}}}}}',
    "nan": '{"schema": 1, "entries": {"flash_attention": {"T64": {"xla": {"config": {}, "microseconds": NaN}}}}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_set_aside(name, path):
    path.parent.mkdir(parents=True)
    path.write_text(DAMAGE[name])
    with pytest.warns(UserWarning, match=r"tuned configs in .*cpu\.json are unreadable .* defaults are used"):
        assert TunedConfigs.load(path) == TunedConfigs()
    assert not path.exists() and path.with_name("cpu.json.damaged").read_text() == DAMAGE[name]
    assert TunedConfigs.load(path) == TunedConfigs()  # and only once


def test_a_file_of_a_later_version_is_left_alone(path):
    newer = '{"schema": 999, "entries": {}}'
    path.parent.mkdir(parents=True)
    path.write_text(newer)
    with pytest.warns(UserWarning, match=r"cpu\.json have schema 999, this version reads 1; it is left alone"):
        assert TunedConfigs.load(path) == TunedConfigs()
    with pytest.raises(RuntimeError, match="have schema 999"):
        ONE.save(path)
    with pytest.warns(UserWarning, match="could not be saved"):
        keep(ONE, path)
    assert path.read_text() == newer and {p.name for p in path.parent.iterdir()} <= {path.name, path.name + ".lock"}


def full_disk(monkeypatch):
    """Half a file is written, then there is no room."""

    def write_bytes(self, data):
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_full_disk_leaves_the_file_as_it_was(path, monkeypatch):
    ONE.save(path)
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        TWO.save(path)
    assert TunedConfigs.load(path) == ONE
    assert {p.name for p in path.parent.iterdir()} <= {path.name, path.name + ".lock"}


def test_a_link_to_a_file_stays_one(path, tmp_path):
    path.parent.mkdir(parents=True)
    target = tmp_path / "elsewhere.json"
    path.symlink_to(target)
    ONE.save(path)
    TWO.save(path)
    assert path.is_symlink() and TunedConfigs.load(target) == ONE | TWO


def test_a_device_stays_one():
    before = os.stat(os.devnull)
    write_whole(Path(os.devnull), "a")
    assert os.stat(os.devnull).st_rdev == before.st_rdev


def test_what_cannot_be_saved_is_kept_until_it_can(path):
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("in the way")
    with pytest.warns(UserWarning, match=r"could not be saved: .*; they serve this process alone"):
        keep(ONE, path)
    assert unsaved(path) == ONE and TunedConfigs.load(path) == TunedConfigs()
    assert [p.name for p in path.parent.parent.iterdir()] == [path.parent.name]
    path.parent.unlink()
    keep(TWO, path)
    assert TunedConfigs.load(path) == ONE | TWO and unsaved(path) == TunedConfigs()


def test_bytes_that_are_no_text(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="unreadable"):
        assert TunedConfigs.load(path) == TunedConfigs()


def test_saving_over_a_damaged_file(path):
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.warns(UserWarning, match="unreadable"):
        ONE.save(path)
    assert TunedConfigs.load(path) == ONE


def test_a_folder_in_its_place(path):
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="unreadable"):
        assert TunedConfigs.load(path) == TunedConfigs()


def _write(path, number):
    for n in range(10):
        TunedConfigs().add("flash_attention", f"T{n}", f"p{number}", {"block_q": number}, 1.0).save(path)


def test_writers_at_the_same_time_lose_nothing(path):
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = TunedConfigs.load(path)
    for n in range(10):
        assert found.times("flash_attention", f"T{n}").keys() == {f"p{number}" for number in range(4)}
