"""Restores from the persistent tier: all ranks agree on its newest whole checkpoint, and load it into their slots.

Collective; nothing live is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capricorn.errors import ConfigError, LayoutMismatchError, StateError, StoreError, shortened
from capricorn.runtime.comm.collectives import gather_texts, maxima, newest
from capricorn.runtime.persist.layout import Manifest, folder_of, iterations_in
from capricorn.runtime.persist.load import lasting, load_into, missing, select, small_values_of
from capricorn.runtime.store.node_store import NodeStore
from capricorn.runtime.store.slot import Slot
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext
from capricorn.systems.small_values import Encoded
from capricorn.units import format_bytes

_TEXT_BYTES: Final = 1024
_WHOLE, _UNFIT = "whole:", "unfit:"
"""The judgement of a rank on a checkpoint begins with one of these; otherwise it says how it is damaged."""


class PersistentTier:
    """The checkpoints of the persistent tier, as one rank finds them."""

    def __init__(self, job: JobContext, root: Path, store: NodeStore, state: FlatState) -> None:
        """Looks at nothing yet.

        Args:
            job: who and where this rank is.
            root: the folder of the persistent tier.
            store: of this node, into whose slots checkpoints are loaded.
            state: of this rank.
        """
        self._root, self._store, self._state = root, store, state
        self._rank, self._group, self._attempt = job.rank, job.control_group, job.attempt
        self._world_size = job.topology.world_size
        self._refused: set[int] = set()
        self.notes: list[str] = []
        """Remarks on the checkpoint that was loaded, in words."""

    def newest(self) -> int | None:
        """Returns the newest iteration that some rank sees and that has not proved damaged, if any. Collective."""
        seen = (iteration for iteration in iterations_in(self._root) if iteration not in self._refused)
        return newest(self._group, max(seen, default=None))

    def refuse_other_state(self) -> None:
        """Looks whether the newest checkpoint that reads is of this state, before anything is done to it. Collective.

        Raises:
            LayoutMismatchError: on all ranks, it is not.
        """
        while (iteration := self.newest()) is not None:
            _, manifest = self._read(iteration)
            if manifest is not None:
                self._sources(folder_of(self._root, iteration), manifest)
                break
            self._refused.add(iteration)
        self._refused.clear()

    def obtain(self, iteration: int, keep: int | None) -> str:
        """Leaves a verified copy in a slot of every rank; otherwise returns what was wrong, alike on all ranks.
        Collective.

        Args:
            iteration: of the checkpoint.
            keep: the iteration in memory that is taken if this one proves damaged; None if there is none.

        Raises:
            LayoutMismatchError: on all ranks, it is of another state.
            ConfigError: on all ranks, it cannot be spread over that many ranks, or the small values need more room.
        """
        folder = folder_of(self._root, iteration)
        damage, manifest = self._read(iteration)
        if manifest is None:
            self._refused.add(iteration)
            return damage
        sources = self._sources(folder, manifest)
        answer, slot, values = _WHOLE, None, None
        try:
            values = self._small_values(folder, manifest)
        except ConfigError as error:
            answer = f"{_UNFIT}{error}"
        except StoreError as error:
            answer = str(error)
        if not (damage := self._agree(folder, answer)):
            slot = self._store.receive(self._rank, iteration, keep, self._attempt)
            damage = self._agree(folder, self._load(slot, sources, values, folder, manifest))
        if not damage and slot is not None:
            self._store.commit(slot)
            self._store.adopt(slot)
            self._note(manifest)
            return ""
        if slot is not None:
            slot.abort()
        self._refused.add(iteration)
        return damage

    def _read(self, iteration: int) -> tuple[str, Manifest | None]:
        """Returns the manifest of a checkpoint that all ranks see alike; otherwise what is wrong, and None.

        Raises:
            ConfigError: on all ranks, it was written by a newer version.
        """
        folder, manifest = folder_of(self._root, iteration), None
        try:
            manifest = Manifest.read(folder)
            answer = f"{_WHOLE}{manifest.seal}"
        except ConfigError as error:
            answer = f"{_UNFIT}{error}"
        except StoreError as error:
            answer = str(error)
        answers = gather_texts(self._group, answer, _TEXT_BYTES)
        if unfit := _first_unfit(answers):
            raise ConfigError(unfit)
        if len(set(answers)) == 1 and manifest is not None:
            return "", manifest
        damaged = (text for text in answers if not text.startswith(_WHOLE))
        return next(damaged, f"{folder}, which differs between ranks"), None

    def _sources(self, folder: Path, manifest: Manifest) -> dict[str, str]:
        """Returns the keys of the tensors that this rank takes.

        Raises:
            LayoutMismatchError: on all ranks, if a rank's tensors are not in it, or some of it are of no rank.
        """
        sources, problems = select(self._state.entries, manifest, self._rank)
        mine = set(sources.values())
        taken = maxima(self._group, [key in mine for key in lasting(manifest)])
        left = missing(manifest, map(bool, taken))
        differing = [text for text in gather_texts(self._group, shortened(problems), _TEXT_BYTES) if text]
        if left or differing:
            found = shortened([*left[: 1 if differing else len(left)], *differing[:1]])
            raise LayoutMismatchError(
                f"{folder} is of another state: {found}; nothing was touched: lay the state out as it was, or name "
                "another --persist-dir"
            )
        return sources

    def _small_values(self, folder: Path, manifest: Manifest) -> Encoded | None:
        block = next((entry for entry in self._state.entries if entry.is_values), None)
        if block is None:
            return None
        values = small_values_of(self._state, folder, manifest, self._rank, self._world_size)
        encoded = Encoded(values)
        if encoded.num_bytes > block.num_bytes:
            raise StateError(
                f"its small values take {format_bytes(encoded.num_bytes)}, and have room for "
                f"{format_bytes(block.num_bytes)}: lay the state out with FlatState(value_bytes={encoded.num_bytes})"
            )
        return encoded

    def _load(
        self, slot: Slot, sources: dict[str, str], values: Encoded | None, folder: Path, manifest: Manifest
    ) -> str:
        try:
            load_into(slot, self._state.entries, sources, values, folder, manifest)
        except StoreError as error:
            return str(error)
        return _WHOLE

    def _agree(self, folder: Path, answer: str) -> str:
        """Returns what is wrong on the first rank on which something is; empty if nothing is. Collective.

        Raises:
            ConfigError: on all ranks, if the checkpoint does not fit one.
        """
        answers = gather_texts(self._group, answer, _TEXT_BYTES)
        if unfit := _first_unfit(answers):
            raise ConfigError(f"{folder} does not fit: {unfit}; name another --persist-dir")
        return next((text for text in answers if not text.startswith(_WHOLE)), "")

    def _note(self, manifest: Manifest) -> None:
        if manifest.world_size != self._world_size:
            self.notes.append(
                f"spread from {manifest.world_size} ranks over {self._world_size}: random states are drawn anew"
            )


def _first_unfit(answers: Sequence[str]) -> str:
    """Returns why a checkpoint does not fit the first rank that it does not fit; empty if it fits all."""
    return next((text.removeprefix(_UNFIT) for text in answers if text.startswith(_UNFIT)), "")
