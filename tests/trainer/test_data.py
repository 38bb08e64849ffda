from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capricorn.config.scenario import DataConfig
from capricorn.errors import ConfigError
from capricorn.trainer import data
from capricorn.trainer.data import Batches, prepare

PROSE = "the quick brown fox jumps over the lazy dog, äöü and all\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_text("second " * 50)
    (folder / "one.txt").write_text(PROSE * 50)
    return folder


def tokens_of(path: Path) -> np.ndarray:
    return np.load(path)


def counting(tmp_path: Path, num_tokens: int) -> Path:
    """A token file whose tokens are their own positions."""
    path = tmp_path / f"counting-{num_tokens}.npy"
    np.save(path, np.arange(num_tokens, dtype=np.uint32))
    return path


def test_a_vocabulary_of_256_is_the_bytes_of_the_text(corpus: Path, tmp_path: Path) -> None:
    tokens = tokens_of(prepare(DataConfig(path=str(corpus / "one.txt")), 256, tmp_path))
    assert tokens.dtype == np.uint8
    assert tokens.tobytes().decode() == PROSE * 50


def test_a_larger_vocabulary_is_a_bpe_of_at_most_that_size(corpus: Path, tmp_path: Path) -> None:
    tokens = tokens_of(prepare(DataConfig(path=str(corpus)), 300, tmp_path))
    assert tokens.dtype == np.uint16
    assert 256 <= tokens.max() < 300
    assert tokens.size < len((PROSE * 50).encode()) / 2
    huge = tokens_of(prepare(DataConfig(path=str(corpus)), 201_088, tmp_path))
    assert huge.dtype == np.uint32
    assert huge.max() < 201_088


def test_a_folder_is_read_in_order_without_what_is_hidden_or_no_text(corpus: Path, tmp_path: Path) -> None:
    whole = tokens_of(prepare(DataConfig(path=str(corpus)), 256, tmp_path)).tobytes()
    assert whole == (PROSE * 50 + "\n" + "second " * 50).encode()
    (corpus / "binary.bin").write_bytes(b"\0\1\2" * 100)
    (corpus / "latin.txt").write_bytes("\xe4".encode("latin-1"))
    (corpus / ".hidden").write_text("hidden")
    (corpus / ".git").mkdir()
    (corpus / ".git" / "config").write_text("hidden")
    os.mkfifo(corpus / "pipe")
    assert tokens_of(prepare(DataConfig(path=str(corpus)), 256, tmp_path)).tobytes() == whole


def test_the_cache_key_follows_the_content(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(path=str(corpus))
    first = prepare(config, 300, tmp_path)
    made = first.stat().st_mtime_ns
    assert prepare(config, 300, tmp_path) == first
    assert first.stat().st_mtime_ns == made
    assert prepare(config, 301, tmp_path) != first
    (corpus / "one.txt").write_text(PROSE * 51)
    assert prepare(config, 300, tmp_path) != first


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_cache_file_is_made_again(corpus: Path, tmp_path: Path, damage: str) -> None:
    config = DataConfig(path=str(corpus))
    path = prepare(config, 300, tmp_path)
    good = path.read_bytes()
    flipped = good[:200] + bytes([good[200] ^ 1]) + good[201:]
    path.write_bytes({"truncated": good[:-9], "flipped": flipped, "empty": b""}[damage])
    assert prepare(config, 300, tmp_path).read_bytes() == good


def test_launchers_that_race_leave_one_good_file(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: prepare(DataConfig(path=str(corpus)), 256, cache), range(16)))
    assert list(cache.iterdir()) == [paths[0]]
    assert tokens_of(paths[0]).size > 0


def test_two_processes_make_the_same_bpe(corpus: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from capricorn.config.scenario import DataConfig\n"
        "from capricorn.trainer.data import Batches, prepare\n"
        "path = prepare(DataConfig(path=sys.argv[1]), 400, Path(sys.argv[2]))\n"
        "print(Batches(path, 0, 1, 1, 8, 0).digest)"
    )
    command = [sys.executable, "-c", script, str(corpus)]
    digests = {subprocess.check_output([*command, str(tmp_path / name)]) for name in ("a", "b")}
    assert len(digests) == 1


def test_the_text_read_is_bounded(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The bound falls inside a two-byte character.
    bound = len(b"the quick brown fox jumps over the lazy dog, ") + 1
    monkeypatch.setattr(data, "MAX_TEXT_BYTES", bound)
    assert tokens_of(prepare(DataConfig(path=str(corpus)), 256, tmp_path)).size == bound
    assert tokens_of(prepare(DataConfig(path=str(corpus)), 300, tmp_path)).max() < 300


def test_the_standard_library_is_python_source(tmp_path: Path) -> None:
    path = prepare(DataConfig(), 256, tmp_path)
    text = tokens_of(path).tobytes()
    assert 2_000_000 < len(text) <= data.MAX_TEXT_BYTES
    assert b"def contextmanager(func):" in text
    begin = time.perf_counter()
    assert prepare(DataConfig(), 256, tmp_path) == path
    assert time.perf_counter() - begin < 2  # 0.05 s where nothing else runs


def test_the_cache_is_where_caches_are(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare(DataConfig(path=str(corpus)), 256).parent == tmp_path / "xdg" / "capricorn-bench"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "there is no such file or folder"),
        (lambda folder: folder, "there is no UTF-8 text in it"),
        (lambda folder: _binary(folder / "binary"), "there is no UTF-8 text in it"),
        (lambda folder: _binary(folder / "short", b"short"), "has 5 tokens, one sequence needs 65"),
    ],
)
def test_a_mistake_in_data_is_said_in_one_line(tmp_path: Path, make, message: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    with pytest.raises(ConfigError, match=message) as error:
        prepare(DataConfig(path=str(make(folder))), 256, tmp_path / "cache", seq_len=64)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"--data {folder}")


def _binary(path: Path, content: bytes = b"\0\xff") -> Path:
    path.write_bytes(content)
    return path


def test_a_cache_that_cannot_be_written_is_said_in_one_line(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the token cache .*; set XDG_CACHE_HOME"):
        prepare(DataConfig(path=str(corpus)), 256, tmp_path / "file")


@pytest.mark.parametrize(
    ("cache", "home", "found"),
    [
        ("/a", "/b", "/a/capricorn-bench"),
        ("", "/b", "/b/.cache/capricorn-bench"),
        ("relative", "/b", "/b/.cache/capricorn-bench"),
        ("", "", "/of/user/.cache/capricorn-bench"),
        (None, None, "/of/user/.cache/capricorn-bench"),
        (None, "relative", "/of/user/.cache/capricorn-bench"),
    ],
)
def test_the_cache_is_that_of_the_user_whatever_the_environment_lacks(
    monkeypatch: pytest.MonkeyPatch, cache: str | None, home: str | None, found: str
) -> None:
    _set(monkeypatch, XDG_CACHE_HOME=cache, HOME=home)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_dir="/of/user"))
    assert str(data._default_cache_dir()) == found


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    _set(monkeypatch, XDG_CACHE_HOME=None, HOME=None)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(ConfigError, match=r"^user \d+ has no home for the token cache; set XDG_CACHE_HOME$"):
        data._default_cache_dir()


def _set(monkeypatch: pytest.MonkeyPatch, **environment: str | None) -> None:
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_targets_are_the_tokens_one_further_on(tmp_path: Path) -> None:
    tokens, targets = Batches(counting(tmp_path, 1000), 0, 2, 4, 16, seed=0).next()
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.flags.c_contiguous
    assert targets.flags.c_contiguous
    assert np.array_equal(targets, tokens + 1)
    assert np.array_equal(tokens - tokens[:, :1], np.tile(np.arange(16), (4, 1)))


@settings(max_examples=40, deadline=None)
@given(
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    num_windows=st.integers(1, 40),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
)
def test_every_epoch_deals_out_each_window_once(
    tmp_path_factory: pytest.TempPathFactory,
    world_size: int,
    batch_size: int,
    num_windows: int,
    epochs: int,
    seed: int,
) -> None:
    path = counting(tmp_path_factory.mktemp("tokens"), num_windows * 8 + 1)
    ranks = [Batches(path, rank, world_size, batch_size, 8, seed) for rank in range(world_size)]
    dealt: list[int] = []
    while len(dealt) < epochs * num_windows:
        for rank in ranks:
            dealt += (rank.next()[0][:, 0] // 8).tolist()
    for epoch in range(epochs):
        assert sorted(dealt[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))


def test_a_batch_follows_from_its_position_alone(tmp_path: Path) -> None:
    path = counting(tmp_path, 2000)
    read = Batches(path, 1, 2, 4, 16, seed=3)
    batches = [read.next() for _ in range(40)]  # 124 windows: batches straddle epochs
    assert read.position == 40 * 8
    for index in (39, 0, 15, 7):
        resumed = Batches(path, 1, 2, 4, 16, seed=3)
        resumed.position = index * 8
        assert np.array_equal(resumed.next(), batches[index])
        assert resumed.position == (index + 1) * 8


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5),
    num_windows=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_jobs_of_any_shapes_that_go_on_from_each_other_read_the_sequences_of_one(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[int, int, int]], num_windows: int, seed: int
) -> None:
    path, dealt, position = counting(tmp_path_factory.mktemp("tokens"), num_windows * 8 + 1), list[int](), 0
    for world_size, batch_size, num_iterations in jobs:
        ranks = [Batches(path, rank, world_size, batch_size, 8, seed) for rank in range(world_size)]
        for rank in ranks:
            rank.position = position
        for _ in range(num_iterations):
            for rank in ranks:
                dealt += (rank.next()[0][:, 0] // 8).tolist()
        assert len({rank.position for rank in ranks}) == 1
        position = ranks[0].position
    alone = Batches(path, 0, 1, 1, 8, seed)
    assert dealt == [int(alone.next()[0][0, 0]) // 8 for _ in range(position)]


def test_the_order_changes_with_seed_and_epoch(tmp_path: Path) -> None:
    path = counting(tmp_path, 64 * 16 + 1)

    def epoch(seed: int, number: int) -> list[int]:
        batches = Batches(path, 0, 1, 64, 16, seed)
        batches.position = number * 64
        return batches.next()[0][:, 0].tolist()

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), list(range(0, 1024, 16))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_the_digest_tells_data_apart(tmp_path: Path) -> None:
    path, other = counting(tmp_path, 1000), counting(tmp_path, 1001)
    assert Batches(path, 0, 2, 4, 16, 0).digest == Batches(path, 1, 2, 2, 8, 1).digest
    assert Batches(path, 0, 2, 4, 16, 0).digest != Batches(other, 0, 2, 4, 16, 0).digest


def test_fewer_tokens_than_one_window_are_refused(tmp_path: Path) -> None:
    Batches(counting(tmp_path, 17), 0, 1, 1, 16, 0).next()
    with pytest.raises(ConfigError, match="has 16 tokens, one sequence needs 17"):
        Batches(counting(tmp_path, 16), 0, 1, 1, 16, 0)
