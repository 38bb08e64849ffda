"""The persistent tier as `inspect` shows it: what each rank has in each checkpoint, and whether it is whole.

Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.persist.layout import (
    METADATA,
    Manifest,
    damage_of,
    folder_of,
    is_checkpoint,
    iteration_of,
    iterations_in,
    metadata_damage,
)
from capricorn.systems.interface import Copy

PERSISTENT: Final = "persistent"
NOBODY: Final = -1
"""In place of an owner: the copy belongs to all of them."""


@dataclass(frozen=True, slots=True)
class PersistedCopy:
    """The copy of one rank in a checkpoint, and what is wrong with it, in words."""

    copy: Copy
    damage: str


def survey_persistent_tier(path: Path) -> list[PersistedCopy]:
    """Returns everything in a folder of checkpoints, or in one of them; every byte is compared with its checksum."""
    root = path.parent if is_checkpoint(path) else path
    iterations = [iteration_of(path)] if is_checkpoint(path) else iterations_in(path)
    found = [each for iteration in iterations for each in _look(root, iteration)]
    # The oldest may have been removed meanwhile by a live run, which is no damage.
    return [each for each in found if folder_of(root, each.copy.iteration).exists()]


def complete_in(found: list[PersistedCopy]) -> list[int]:
    """Returns the iterations of which nothing is damaged."""
    damaged = {each.copy.iteration for each in found if each.damage}
    return sorted({each.copy.iteration for each in found} - damaged)


def _look(root: Path, iteration: int) -> Iterator[PersistedCopy]:
    folder = folder_of(root, iteration)
    try:
        manifest = Manifest.read(folder)
    except (StoreError, ConfigError) as error:
        yield PersistedCopy(Copy(NOBODY, iteration, "damaged", folder), str(error))
        return
    damage = damage_of(folder, manifest, manifest.tensors)
    for owner in range(manifest.world_size):
        held = {key: stored for key, stored in manifest.tensors.items() if stored.owner == owner}
        wrong = [f"{key} {damage[key]}" for key in held if key in damage]
        size = sum(stored.num_bytes for stored in held.values())
        yield _copy(owner, manifest, folder, size, _in_words(wrong))
    if wrong_there := metadata_damage(folder, manifest):
        yield _copy(NOBODY, manifest, folder / METADATA, 0, wrong_there)


def _copy(owner: int, manifest: Manifest, path: Path, num_bytes: int, damage: str) -> PersistedCopy:
    state = "damaged" if damage else "complete"
    return PersistedCopy(Copy(owner, manifest.iteration, state, path, num_bytes, manifest.attempt), damage)


def _in_words(wrong: list[str]) -> str:
    if not wrong:
        return ""
    return wrong[0] + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
