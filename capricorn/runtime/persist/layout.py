"""The persistent tier as it lies on disk: folders, one a checkpoint, each with a manifest that says what must be in it.

Everything is told without torch and without unpickling anything; what is verified against the manifest is whole.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from pydantic import Field, ValidationError

from capricorn.config.fields import FrozenModel
from capricorn.errors import ConfigError, StoreError
from capricorn.files import open_file, read_bytes
from capricorn.runtime.store.slot import checksum
from capricorn.units import Bytes

MANIFEST: Final = "capricorn.json"
METADATA: Final = ".metadata"
"""The library's own table of contents, which we write for its readers and never read."""
FORMAT: Final = 1
VALUE: Final = re.compile(r"rank(\d+)/value/(.+)", re.DOTALL)
"""The key of a tensor among the small values of a rank; under the name `small_values.TREE` lies what else there is of
them, as JSON. Checkpoints of version 0.2 have none of that: their small values are a table of tensors by name."""
_PREFIX, _TEMPORARY, _REMOVED = "iteration-", ".tmp-", ".removed-"
_NAME = re.compile(_PREFIX + r"\d{8,}")


class Stored(FrozenModel):
    """A persisted tensor: what it is, and the stretch of a file that holds it."""

    dtype: str = Field(pattern=r"^(bool|u?int\d+|b?float\d+\w*|complex\d+)$")
    shape: tuple[int, ...]
    owner: int
    xxh3: str
    """Checksum of its bytes."""
    file: str = Field(pattern=r"^__\d+_0\.distcp$")
    offset: Bytes
    num_bytes: Bytes
    stretch_xxh3: str
    """Checksum of the stretch, which is the tensor in the library's packing."""


class RankPart(FrozenModel):
    """The part that the writer of one rank has put into a checkpoint; or why it could not."""

    failure: str = ""
    tensors: Mapping[str, Stored] = {}
    aliases: Mapping[str, str] = {}
    files: Mapping[str, Bytes] = {}


class Manifest(FrozenModel):
    """`capricorn.json`, written last: a folder without it, or that differs from it, is no checkpoint."""

    format: int = FORMAT
    run_id: str
    attempt: int
    iteration: int
    world_size: int
    num_nodes: int
    ranks_per_node: int
    model: str
    """Name of the model, if known."""
    tensors: Mapping[str, Stored]
    """By key; keys are global, and each tensor is whole."""
    aliases: Mapping[str, str]
    """Further names of tied tensors."""
    files: Mapping[str, Bytes]
    """Size of each file but this one."""
    metadata_xxh3: str
    seal: str = ""
    """Checksum of the file as it is written, with nothing in this place; so it depends on no version's fields."""

    def write(self, folder: Path) -> None:
        """Puts the manifest into the folder, and returns when it is on the medium."""
        unsealed = self.model_copy(update={"seal": ""}).model_dump_json().encode()
        write_durably(folder / MANIFEST, _with_seal(unsealed, "", hash_of(unsealed)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Returns the manifest of a checkpoint, of what another version has added without what this one does not know.

        Raises:
            StoreError: it is not there or is damaged.
            ConfigError: it is whole, and of a newer version whose format this one does not know.
        """
        path = folder / MANIFEST
        try:
            data = read_bytes(path)
            fields = json.loads(data)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise StoreError(f"{path} is damaged: it is no JSON") from None
        seal, number = (fields.get(name) if isinstance(fields, dict) else None for name in ("seal", "format"))
        if not isinstance(seal, str) or seal != hash_of(_with_seal(data, seal, "")):
            raise StoreError(f"{path} is damaged: it does not match its seal")
        if not isinstance(number, int) or number > FORMAT:
            what = f"it has format {number}, this version reads up to {FORMAT}"
            raise ConfigError(f"{path} was written by a newer version: {what}")
        try:
            found = cls.model_validate_json(
                json.dumps({name: fields[name] for name in fields if name in cls.model_fields})
            )
        except (ValidationError, ConfigError):
            raise ConfigError(
                f"{path} was written by a newer version, which says what this one does not know"
            ) from None
        if folder != folder_of(folder.parent, found.iteration):
            raise StoreError(f"{folder} holds iteration {found.iteration}: give it back its name")
        return found


def _with_seal(data: bytes, seal: str, other: str) -> bytes:
    """Returns a manifest with another seal in the place of its own, which stands last."""
    head, mark, tail = data.rpartition(f'"seal":"{seal}"'.encode(errors="replace"))
    return head + f'"seal":"{other}"'.encode() + tail if mark else data


# --- folders -----------------------------------------------------------------------------------------------------


def folder_of(root: Path, iteration: int) -> Path:
    """Returns the folder of a checkpoint that is complete."""
    return root / f"{_PREFIX}{iteration:08}"


def temporary_of(root: Path, iteration: int, attempt: int) -> Path:
    """Returns the folder of a checkpoint while it is written."""
    return root / f"{_TEMPORARY}{_PREFIX}{iteration:08}-{attempt}"


def given_up_of(folder: Path) -> Path:
    """Returns the mark beside a folder that rank 0 has given up: others may be late, and make the folder again."""
    return folder.with_name(f"{folder.name}-given-up")


def iterations_in(root: Path) -> list[int]:
    """Returns the iterations of all checkpoints that once were complete, ascending."""
    return sorted(iteration_of(path) for path in _listed(root) if is_checkpoint(path))


def is_checkpoint(path: Path) -> bool:
    """Tells whether a path is the folder of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def iteration_of(folder: Path) -> int:
    """Returns the iteration of a checkpoint, by the name of its folder."""
    return int(folder.name.removeprefix(_PREFIX))


def is_persistent_tier(path: Path) -> bool:
    """Tells whether a folder holds checkpoints, or one that was never completed."""
    return bool(iterations_in(path)) or any(each.name.startswith(_TEMPORARY) for each in _listed(path))


def rank_file(rank: int) -> str:
    """Returns the file of a rank's tensors, as the library names it."""
    return f"__{rank}_0.distcp"


def part_file(rank: int) -> str:
    """Returns the file by which a rank hands in its part."""
    return f"part-{rank}.json"


def value_key(rank: int, name: str) -> str:
    """Returns the key in a checkpoint of a tensor among the small values of a rank."""
    return f"rank{rank}/value/{name}"


def remove(folder: Path) -> None:
    """Removes a folder; renames it first, so that a death halfway leaves nothing that looks whole."""
    gone = folder.with_name(_REMOVED + folder.name.removeprefix("."))
    shutil.rmtree(gone, ignore_errors=True)
    # If it cannot be moved, whoever needs its name will fail and say so.
    with suppress(OSError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def prune(root: Path, newest: int, keep: int) -> None:
    """Removes all but the `keep` newest up to `newest`; later ones are of a future that was abandoned."""
    known = iterations_in(root)
    kept = [iteration for iteration in known if iteration <= newest][-keep:]
    for iteration in known:
        if iteration not in kept:
            remove(folder_of(root, iteration))


def sweep(root: Path, *, but: Path | None = None) -> None:
    """Removes what dead writers have left half written or half removed."""
    for path in _listed(root):
        if path.name.startswith(_TEMPORARY) and path != but:
            remove(path)
        elif path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)


def _listed(root: Path) -> list[Path]:
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# --- what is in them ---------------------------------------------------------------------------------------------


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Yields the bytes of a file, which are read when they are looked at."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
            yield view


def hash_of(data: memoryview | bytes) -> str:
    """Returns the xxh3-64 as it is written in a manifest."""
    return f"{checksum(data):016x}"


def damage_of(folder: Path, manifest: Manifest, keys: Mapping[str, Stored]) -> dict[str, str]:
    """Returns, by key, what is wrong with those tensors, in words; nothing is parsed."""
    damage: dict[str, str] = {}
    by_file: dict[str, list[str]] = {}
    for key, stored in keys.items():
        by_file.setdefault(stored.file, []).append(key)
    for file, held in by_file.items():
        damage |= _damage_in(folder / file, manifest.files.get(file, -1), {key: keys[key] for key in held})
    return damage


def metadata_damage(folder: Path, manifest: Manifest) -> str:
    """Returns what is wrong with the library's table of contents, in words; empty if nothing is."""
    try:
        with mapped(folder / METADATA) as data:
            return "" if hash_of(data) == manifest.metadata_xxh3 else f"{METADATA} does not match its checksum"
    except OSError as error:
        return f"cannot read {METADATA}: {error.strerror}"


def _damage_in(path: Path, num_bytes: Bytes, held: Mapping[str, Stored]) -> dict[str, str]:
    try:
        with mapped(path) as data:
            if len(data) != num_bytes:
                return dict.fromkeys(held, f"{path.name} has {len(data)} bytes, not {num_bytes}")
            wrong = [key for key, stored in held.items() if hash_of(_stretch(data, stored)) != stored.stretch_xxh3]
            return dict.fromkeys(wrong, f"does not match its checksum in {path.name}")
    except OSError as error:
        return dict.fromkeys(held, f"cannot read {path.name}: {error.strerror}")


def _stretch(data: memoryview, stored: Stored) -> memoryview:
    return data[stored.offset : stored.offset + stored.num_bytes]


# --- durability --------------------------------------------------------------------------------------------------


def write_durably(path: Path, data: bytes) -> None:
    """Writes a new file; returns when its content is on the medium."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Returns when that file, or the names in that folder, are on the medium."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
