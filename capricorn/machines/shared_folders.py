"""Folders that all machines must share: found out by a token, since two machines may have a folder of the same name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capricorn.errors import ConfigError
from capricorn.files import named, read_text
from capricorn.launch.persist_folder import TOKEN_PREFIX
from capricorn.records.job_file import Job


def shared_folders(job: Job) -> list[Path]:
    """Returns the folders of a run that all of its machines write to or read from."""
    files_dir = job.files_dir if job.scenario.launch.shared_dir else None
    return [folder for folder in (files_dir, job.persist_dir) if folder is not None]


@contextmanager
def token_in(folders: list[Path]) -> Iterator[str]:
    """Puts a file into each of the folders, by which another machine knows that it sees the same one; removes them."""
    token = secrets.token_hex(8)
    files = [folder / f"{TOKEN_PREFIX}{token}" for folder in folders]
    try:
        for file in files:
            with named(f"write to {file.parent}"):
                file.write_text(token)
        yield token
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def check_shared(folders: list[Path], token: str) -> None:
    """Looks for the token in each of the folders.

    Raises:
        ConfigError: one of them is another folder here than on machine 0, or there is none.
    """
    for folder in folders:
        try:
            is_same = read_text(folder / f"{TOKEN_PREFIX}{token}") == token
        except OSError:
            is_same = False
        if not is_same:
            raise ConfigError(
                f"{folder} is not the folder that machine 0 sees by this name; name one that all machines share: "
                "--shared-dir PATH"
            )
