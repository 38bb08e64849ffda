"""Text as tokens: made once by the launcher into a cached file, then read by each rank as a function of its position.

Knows no tensor, no model and no checkpoint.
"""

from __future__ import annotations

import codecs
import os
import pwd
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from capricorn.config.scenario import DataConfig
from capricorn.errors import ConfigError
from capricorn.units import MIB, Bytes

Tokens: TypeAlias = npt.NDArray[np.int64]

BYTE_VOCAB_SIZE = 256
MAX_TEXT_BYTES: Bytes = 16 * MIB
"""Text beyond this is not read: it bounds the first use to seconds, and is many epochs of a benchmark."""
MAX_BPE_CHARS = 4 * MIB
"""Size of the sample the BPE is trained on."""

_PIECE_CHARS = 1 << 16
_SEAL_BYTES = 8
_NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


def prepare(data: DataConfig, vocab_size: int, cache_dir: Path | None = None, *, seq_len: int = 1) -> Path:
    """Returns the file of tokens for `Batches`, from the cache or newly made; called once, before the ranks start.

    Tokens are bytes for a vocabulary of 256, else ids of a byte-level BPE trained on a sample of that text; on a small
    text its vocabulary stays smaller than asked for. Several launchers may call it at once.

    Args:
        data: where the text is.
        vocab_size: of the model.
        cache_dir: of token files; by default that of the user.
        seq_len: of the model.

    Raises:
        ConfigError: there is no such path, no text in it, too little for one window of `seq_len` tokens and their
            targets,
            or the cache cannot be written.
    """
    text = b"\n".join(_bounded(_texts(data.path)))
    if not text:
        raise ConfigError(f"--data {data.path}: there is no UTF-8 text in it")
    folder = cache_dir or _default_cache_dir()
    path = folder / f"tokens-{vocab_size}-{_key(text, vocab_size)}.npy"
    if not _is_sealed(path):
        try:
            _write_sealed(path, _tokenize(text, vocab_size))
        except OSError as error:
            raise ConfigError(f"cannot write the token cache {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    _check_length(np.load(path, mmap_mode="r").size, seq_len, f"--data {data.path}")
    return path


def _default_cache_dir() -> Path:
    # Only absolute ones, as XDG's specification has it: the ranks need not share our working folder.
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "capricorn-bench"
    try:
        return Path(home if os.path.isabs(home) else pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "capricorn-bench"
    except KeyError:
        raise ConfigError(f"user {os.getuid()} has no home for the token cache; set XDG_CACHE_HOME") from None


def _check_length(num_tokens: int, seq_len: int, where: str) -> None:
    if num_tokens < seq_len + 1:
        raise ConfigError(f"{where} has {num_tokens} tokens, one sequence needs {seq_len + 1}; add text or use less")


def _texts(source: str) -> Iterator[bytes]:
    """Yields the texts at the source in a fixed order, each cut to the bound; in a folder, other files are skipped."""
    if source == "stdlib":
        paths = (p for p in _walk(Path(sysconfig.get_path("stdlib")), _NOT_SOURCES) if p.suffix == ".py")
        yield from filter(None, map(_read_text, paths))
        return
    try:
        path = Path(source).expanduser()
    except RuntimeError:
        raise ConfigError(f"--data {source}: there is no such user's home") from None
    if path.is_dir():
        yield from filter(None, map(_read_text, _walk(path)))
    elif path.is_file():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--data {source}: no permission to read it")
        yield _read_text(path)
    else:
        raise ConfigError(f"--data {source}: there is no such file or folder; give a path or 'stdlib'")


def _walk(folder: Path, excluded: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in excluded)
        # Only regular files: opening a pipe would wait for its writer.
        yield from (p for name in sorted(files) if name[0] != "." and (p := Path(where, name)).is_file())


def _read_text(path: Path) -> bytes:
    """Returns the file's first bytes up to the bound; nothing if it cannot be read or is not UTF-8 text."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES)
        # Incremental, so that a character cut in two by the bound is no error.
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < MAX_TEXT_BYTES)
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content


def _bounded(texts: Iterator[bytes]) -> Iterator[bytes]:
    left = MAX_TEXT_BYTES
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _key(text: bytes, vocab_size: int) -> str:
    made_by = "bytes" if vocab_size == BYTE_VOCAB_SIZE else f"bpe {version('tokenizers')} {MAX_BPE_CHARS}"
    return xxhash.xxh3_128_hexdigest(text + f"\0{made_by}".encode())


def _tokenize(text: bytes, vocab_size: int) -> npt.NDArray[Any]:
    """Returns token ids in the smallest unsigned type that holds `vocab_size` of them."""
    if vocab_size == BYTE_VOCAB_SIZE:
        return np.frombuffer(text, np.uint8)
    chars = text.decode("utf-8", "ignore")
    pieces = [chars[start : start + _PIECE_CHARS] for start in range(0, len(chars), _PIECE_CHARS)]
    tokenizer = _train_bpe(pieces[:: -(-len(chars) // MAX_BPE_CHARS)], vocab_size)
    dtype = np.min_scalar_type(vocab_size - 1)
    return np.concatenate([np.array(tokenizer.encode(piece).ids, dtype) for piece in pieces])


def _train_bpe(sample: list[str], vocab_size: int) -> Any:
    # Imported here since a cached file needs none of it.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=byte_level.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _is_sealed(path: Path) -> bool:
    """Tells whether a file is there, whole, and an array of plain numbers."""
    try:
        content = memoryview(path.read_bytes())
        np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        return False
    return xxhash.xxh3_64_digest(content[:-_SEAL_BYTES]) == content[-_SEAL_BYTES:]


def _write_sealed(path: Path, tokens: npt.NDArray[Any]) -> None:
    """Writes an .npy file with its checksum behind the array, where readers of .npy do not look."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    temporary = Path(name)
    try:
        with open(fd, "w+b") as file:
            np.save(file, tokens, allow_pickle=False)
            file.seek(0)
            file.write(xxhash.xxh3_64_digest(file.read()))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Batches:
    """The batches that one rank trains on, as a function of (seed, position, rank, world_size, batch_size) alone.

    The tokens are cut into windows of `seq_len` inputs, whose targets are the tokens one further on. Every epoch
    assigns each window to one rank once, in an order of its own. The position is that of the job: jobs of any number of
    ranks and any batch size read the windows in the same order, and each may go on where another has stopped.
    """

    def __init__(self, path: Path, rank: int, world_size: int, batch_size: int, seq_len: int, seed: int) -> None:
        """Maps the file of tokens, at position 0.

        Args:
            path: made by `prepare`.
            rank: this rank.
            world_size: number of ranks.
            batch_size: sequences of a batch.
            seq_len: tokens of a sequence.
            seed: of the order of the windows.

        Raises:
            ConfigError: the text is shorter than one window.
        """
        self._tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r").view(np.ndarray)
        _check_length(self._tokens.size, seq_len, str(path))
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size
        self.seq_len, self.seed = seq_len, seed
        self._num_windows = (self._tokens.size - 1) // seq_len
        self._window = np.arange(seq_len + 1)
        self.position = 0
        """Number of sequences that all ranks together have read; may be set, to resume."""
        self.digest: int = xxhash.xxh3_64_intdigest(self._tokens)
        """64-bit digest of all tokens: equal on machines that train on the same data."""

    def next(self) -> tuple[Tokens, Tokens]:
        """Returns the token ids of the next batch and their targets, both [batch_size, seq_len]."""
        first = self.position + self.rank * self.batch_size
        windows = [self._window_at(count) for count in range(first, first + self.batch_size)]
        starts = np.array(windows)[:, None] * (self._window.size - 1)
        batch = self._tokens[starts + self._window].astype(np.int64)
        self.position += self.world_size * self.batch_size
        return np.ascontiguousarray(batch[:, :-1]), np.ascontiguousarray(batch[:, 1:])

    def _window_at(self, count: int) -> int:
        """Returns the window with number `count` since the start of training, over all ranks."""
        epoch, index = divmod(count, self._num_windows)
        return int(_shuffled(self._num_windows, self.seed, epoch)[index])


@lru_cache(maxsize=2)  # two: a batch may straddle the end of an epoch
def _shuffled(num_windows: int, seed: int, epoch: int) -> Tokens:
    return np.random.default_rng((seed, epoch)).permutation(num_windows)
