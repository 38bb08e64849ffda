"""Files are read without a wait and written whole, and what goes wrong names them in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from capricorn.errors import CapricornError, ConfigError
from capricorn.files import ON_THE_WAY, check_regular, named, open_descriptor, open_file, read_text, write_text
from tests.support.small_files import NOT_FILES, files_end_at


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_file_is_named_at_once_and_not_read(kind: str, tmp_path: Path) -> None:
    NOT_FILES[kind](tmp_path / "it")
    words = {"socket": "No such device", "folder": "Is a directory"}.get(kind, f"it is a {kind}, not a file")
    with pytest.raises(ConfigError, match=rf"^cannot read it: {words}"), named("read it"):
        open_file(tmp_path / "it")
    with pytest.raises(OSError, match=r"not a file|Is a directory"):
        check_regular(tmp_path / "it")


def test_a_fifo_is_not_waited_for_when_it_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=r"No such device|it is a FIFO"):
            open_descriptor(tmp_path / "fifo", flags)


def test_a_file_that_is_written_reads_back(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "ä\n")
    assert read_text(tmp_path / "file") == "ä\n"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "before")
    with files_end_at(100), pytest.raises(CapricornError, match=rf"^cannot write {tmp_path / 'file'}: File too large$"):
        write_text(tmp_path / "file", "x" * 1000)
    assert read_text(tmp_path / "file") == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ENOENT])
def test_what_the_machine_lacks_fails_and_what_the_user_named_is_his_mistake(number: int) -> None:
    with pytest.raises(CapricornError) as raised, named("write x"):
        raise OSError(number, os.strerror(number), "y")
    assert raised.value.exit_code == (1 if number in ON_THE_WAY else 2)
    assert str(raised.value) == f"cannot write x: {os.strerror(number)}"
