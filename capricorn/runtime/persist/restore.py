"""Restores from the persistent tier: all ranks agree on its newest whole checkpoint, and load it into their slots.

Collective; nothing live is touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.comm.collectives import gather_texts, maximum, total
from capricorn.runtime.persist.layout import Manifest, folder_of, iterations_in
from capricorn.runtime.persist.load import load_into, num_lasting, select
from capricorn.runtime.store.node_store import NodeStore
from capricorn.systems.flat_state import FlatState
from capricorn.systems.interface import JobContext

_TEXT_BYTES: Final = 1024
_WHOLE, _UNFIT = "whole ", "unfit "
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

    def newest(self) -> int:
        """Returns the newest iteration that some rank sees and that has not proved damaged; 0 is none. Collective."""
        return maximum(self._group, max((i for i in iterations_in(self._root) if i not in self._refused), default=0))

    def obtain(self, iteration: int, keep: int) -> str:
        """Leaves a verified copy in a slot of every rank; otherwise returns what was wrong, alike on all ranks.
        Collective.

        Args:
            iteration: of the checkpoint.
            keep: an iteration in memory that must stay.

        Raises:
            ConfigError: on all ranks, it is of another model, or cannot be spread over that many ranks.
        """
        folder = folder_of(self._root, iteration)
        slot = self._store.begin(self._rank, iteration, keep, self._attempt)
        num_taken, answer = 0, ""
        try:
            manifest = Manifest.read(folder)
            sources = select(self._state, manifest, self._rank, self._world_size)
            load_into(slot, self._state, sources, folder, manifest)
        except ConfigError as error:
            answer = f"{_UNFIT}{error}"
        except StoreError as error:
            answer = str(error)
        else:
            num_taken, answer = num_lasting(sources.values()), f"{_WHOLE}{manifest.seal}"
        answers, num_taken = gather_texts(self._group, answer, _TEXT_BYTES), total(self._group, num_taken)
        if len(set(answers)) == 1 and answer.startswith(_WHOLE):
            num_left = num_lasting(manifest.tensors) - num_taken
            if not num_left:
                self._store.commit(slot)
                self._note(manifest)
                return ""
            answers = [f"{_UNFIT}it is of another model: {num_left} of its tensors are of no rank"]
        slot.abort()
        self._refused.add(iteration)
        unfit = [text.removeprefix(_UNFIT) for text in answers if text.startswith(_UNFIT)]
        if unfit:
            raise ConfigError(f"{folder} does not fit: {unfit[0]}; name another --persist-dir")
        return next((text for text in answers if not text.startswith(_WHOLE)), f"{folder}, which differs between ranks")

    def _note(self, manifest: Manifest) -> None:
        if manifest.world_size != self._world_size:
            self.notes.append(
                f"spread from {manifest.world_size} ranks over {self._world_size}: random states are drawn anew"
            )
