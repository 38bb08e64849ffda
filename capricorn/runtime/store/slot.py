"""One slot of the memory store: a file on tmpfs that holds one owner's state of one iteration, mapped into memory.

A slot is a header page (with a checksum of its own), a table of one xxh3 checksum per block, and the payload.

    state      entered by   what the slot holds
    EMPTY      `abort`      nothing; also when the file is new
    WRITING    `begin`      a part of the iteration in its header
    COMPLETE   `commit`     all of it, and the checksum of its table

A header torn by a kill reads as damaged, never as complete.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import xxhash

from capricorn.errors import StoreError
from capricorn.runtime.store.populate import make_mapping, takes_advice
from capricorn.units import Bytes, format_bytes

PAGE: Final = 4096
EMPTY, WRITING, COMPLETE = "empty", "writing", "complete"
_STATES = (EMPTY, WRITING, COMPLETE)
_MAGIC, _VERSION = b"CAPRSLOT", 1
_FIELDS = struct.Struct("<8sIIIIQQQQQ")
_CHECKSUM = struct.Struct("<Q")
AUDIT_EVENT: Final = "capricorn.store"
"""Python's audit event right before each change of a hosted copy or its layout, with what it is: `create`, `begin`,
`block`, `commit`, `abort`, `manifest`."""


def checksum(data: memoryview | bytes) -> int:
    """Returns the 64-bit xxh3; releases the GIL on large inputs, so it may run on a thread beside training."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a slot; equal for all copies of one owner."""

    payload_bytes: Bytes
    block_bytes: Bytes
    digest: int
    """Digest of the state's layout, see `ShardState.digest`."""

    @property
    def num_blocks(self) -> int:
        return -(-self.payload_bytes // self.block_bytes)

    @property
    def payload_offset(self) -> Bytes:
        table_bytes = 8 * self.num_blocks
        return PAGE + -(-table_bytes // PAGE) * PAGE

    @property
    def file_bytes(self) -> Bytes:
        return self.payload_offset + -(-self.payload_bytes // PAGE) * PAGE

    def block(self, index: int) -> slice:
        """Returns the range of the payload that block `index` covers."""
        start = index * self.block_bytes
        return slice(start, min(start + self.block_bytes, self.payload_bytes))


@dataclass(frozen=True, slots=True)
class Header:
    """The first page of a slot, which describes it."""

    state: str
    owner: int
    attempt: int
    iteration: int
    layout: Layout
    table_checksum: int = 0

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC, _VERSION, _STATES.index(self.state), self.owner, self.attempt, self.iteration,
            self.layout.payload_bytes, self.layout.block_bytes, self.layout.digest, self.table_checksum,
        )  # fmt: skip
        return fields + _CHECKSUM.pack(checksum(fields))

    @classmethod
    def unpack(cls, page: bytes) -> Self | None:
        """Returns the header in a page, or None if it is damaged or foreign."""
        fields = page[: _FIELDS.size]
        tail = page[_FIELDS.size : _FIELDS.size + _CHECKSUM.size]
        if len(tail) < _CHECKSUM.size or _CHECKSUM.unpack(tail)[0] != checksum(fields):
            return None
        magic, version, state, owner, attempt, iteration, payload, block, digest, table = _FIELDS.unpack(fields)
        if magic != _MAGIC or version != _VERSION or state >= len(_STATES) or block == 0:
            return None
        return cls(_STATES[state], owner, attempt, iteration, Layout(payload, block, digest), table)


def read_header(path: Path) -> Header | None:
    """Returns the header of a slot file, or None if it is damaged.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        # Neither through a link, nor waiting for the writer of a pipe: the folder may be anybody's.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return Header.unpack(file.read(PAGE))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None


class AuditedTable:
    """A table of checksums that tells of each block before its entry is written."""

    def __init__(self, table: memoryview) -> None:
        self._table, self.release = table, table.release

    def __getitem__(self, index: int) -> int:
        return int(self._table[index])

    def __setitem__(self, index: int, check: int) -> None:
        sys.audit(AUDIT_EVENT, "block")
        self._table[index] = check

    def __bytes__(self) -> bytes:
        return bytes(self._table)


class Slot:
    """A slot file mapped for reading and writing; one process writes it at a time.

    Attributes:
        payload: the state, `layout.payload_bytes` long; written in place, block by block.
        table: checksum of each block; the writer fills it before `commit`.
    """

    def __init__(self, path: Path, owner: int, layout: Layout, *, create: bool = True) -> None:
        """Maps the file, first making it and claiming all its memory if it is not there.

        Args:
            path: of the file.
            owner: whose state it holds.
            layout: sizes of the state.
            create: whether a missing file is made.

        Raises:
            StoreError: tmpfs is full, or the file belongs to a state of another layout.
        """
        self.path, self.owner, self.layout = path, owner, layout
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error.strerror}") from None
        try:
            fresh = os.fstat(fd).st_size != layout.file_bytes
            if fresh and not (create and _is_cut(fd, layout)):
                raise StoreError(f"{path} holds a state of another size; remove it with 'capricorn-bench clean'")
            try:
                self._map = _claimed(fd, path, layout.file_bytes) if create else mmap.mmap(fd, layout.file_bytes)
            except StoreError:
                if fresh:
                    path.unlink(missing_ok=True)
                raise
        finally:
            os.close(fd)
        view = memoryview(self._map)
        self.payload = view[layout.payload_offset : layout.payload_offset + layout.payload_bytes]
        self.table = AuditedTable(view[PAGE : PAGE + 8 * layout.num_blocks].cast("Q"))
        if fresh:
            self._write("create", Header(EMPTY, owner, 0, 0, layout))

    @property
    def header(self) -> Header | None:
        return Header.unpack(self._map[:PAGE])

    def view(self, start: int, stop: int) -> memoryview:
        """Returns these bytes of the payload."""
        return self.payload[start:stop]

    def checksum(self, index: int) -> int:
        """Returns the checksum of a block, from the table."""
        return int(self.table[index])

    @property
    def is_complete(self) -> bool:
        """Whether it is a complete copy of a state of this layout, by its header."""
        header = self.header
        return header is not None and header.state == COMPLETE and header.layout == self.layout

    def holds(self, iteration: int) -> bool:
        """Tells whether it is a complete copy of that iteration, by its header."""
        header = self.header
        return self.is_complete and header is not None and header.iteration == iteration

    def begin(self, iteration: int, attempt: int) -> None:
        """Gives up what the slot held and makes it ready to be written."""
        self._write("begin", Header(WRITING, self.owner, attempt, iteration, self.layout))

    def commit(self) -> None:
        """Declares what was written complete; the table must be filled."""
        header = self.header
        assert header is not None
        assert header.state == WRITING
        self._write("commit", replace(header, state=COMPLETE, table_checksum=checksum(bytes(self.table))))

    def abort(self) -> None:
        """Declares the slot empty."""
        self._write("abort", Header(EMPTY, self.owner, 0, 0, self.layout))

    def damaged_block(self) -> int | None:
        """Returns the first block that does not match its checksum; -1 stands for the table itself, None for none."""
        header = self.header
        if header is None or header.table_checksum != checksum(bytes(self.table)):
            return -1
        blocks = range(self.layout.num_blocks)
        return next((i for i in blocks if checksum(self.payload[self.layout.block(i)]) != self.table[i]), None)

    def close(self) -> None:
        """Unmaps the file unless a view of it is still in use; then the mapping ends with that view."""
        self.table.release()
        try:
            self.payload.release()
            self._map.close()
        except BufferError:
            return

    def _write(self, call: str, header: Header) -> None:
        sys.audit(AUDIT_EVENT, call)
        packed = header.pack()
        self._map[: len(packed)] = packed


def enlarge(path: Path, owner: int, layout: Layout) -> None:
    """Gives a copy the further bytes of a larger layout, all zero; one that is damaged is removed.

    If this is interrupted, the copy remains as it was.

    Raises:
        StoreError: there is no room for both at once.
    """
    header = read_header(path)
    assert header is not None
    larger = path.with_name(f".{path.name}")
    larger.unlink(missing_ok=True)
    old = Slot(path, owner, header.layout, create=False)
    try:
        if old.damaged_block() is not None:
            path.unlink()
            return
        new = Slot(larger, owner, layout)
        new.begin(header.iteration, header.attempt)
        new.payload[: header.layout.payload_bytes] = old.payload
        for index in range(layout.num_blocks):
            new.table[index] = checksum(new.payload[layout.block(index)])
        new.commit()
        new.close()
        larger.replace(path)
    finally:
        old.close()


def _is_cut(fd: int, layout: Layout) -> bool:
    """Tells whether a file without the size of that layout has nothing to lose: it is new, or was cut short."""
    # Whoever is killed while it claims the memory, which takes a while, leaves an empty file.
    header = Header.unpack(os.pread(fd, PAGE, 0))
    return os.fstat(fd).st_size < layout.file_bytes and (header is None or header.layout == layout)


def _claimed(fd: int, path: Path, num_bytes: Bytes) -> mmap.mmap:
    free = os.statvfs(path.parent)  # before we take of it
    try:
        return make_mapping(fd, num_bytes, advised=takes_advice(path.parent.resolve()))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise StoreError(f"cannot make {path}: {error.strerror}") from None
        raise StoreError(
            f"no room for {format_bytes(num_bytes)} in {path.parent}, {format_bytes(free.f_bavail * free.f_frsize)} "
            "are free; enlarge that tmpfs, use fewer --replicas, or set store.root"
        ) from None
