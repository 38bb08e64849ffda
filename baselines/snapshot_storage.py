"""The modelled file system behind the storage interface of TorchSnapshot; that of torch's DCP is in `dcp_storage`.

Bytes go to a real folder, after (when written) or before (when read) the time that they would take. Knows no system.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from torchsnapshot.io_types import ReadIO, WriteIO
from torchsnapshot.storage_plugins.fs import FSStoragePlugin

from capricorn.emulation.storage import Storage
from capricorn.errors import ConfigError
from capricorn.units import Bytes

PROTOCOL: Final = "paced"
"""Of the URL that leads TorchSnapshot to the plugin: `paced:///folder`, by an entry point of that name."""


def storage_options(folder: Path, node: int) -> dict[str, Any]:
    """What to give TorchSnapshot with the URL. Not part of it, since all ranks are made to use the URL of rank 0."""
    return {"storage": str(folder), "node": node}


class PacedPlugin(FSStoragePlugin):
    """TorchSnapshot's own plugin for files, charged for what it moves."""

    def __init__(self, root: str, options: dict[str, Any] | None = None) -> None:
        """Opens the clocks that `storage_options` names; TorchSnapshot closes them.

        Raises:
            ConfigError: the options do not say which storage, and of which node.
            TransportError: that storage is not there.
        """
        if options is None or not {"storage", "node"} <= options.keys():
            raise ConfigError(f"{PROTOCOL}://{root} needs the storage_options 'storage' and 'node'; got {options}")
        super().__init__(root)
        self._storage = Storage(Path(options["storage"]), options["node"])
        # One thread, so that a rank is one flow however many of its files are on their way.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="capricorn-storage")

    async def write(self, write_io: WriteIO) -> None:
        await self._charge(memoryview(write_io.buf).nbytes)
        await super().write(write_io)

    async def read(self, read_io: ReadIO) -> None:
        await super().read(read_io)
        await self._charge(read_io.buf.getbuffer().nbytes)

    def give_up(self) -> None:
        """Makes what is on its way fail."""
        self._storage.close()

    async def close(self) -> None:
        self._executor.shutdown()
        self._storage.close()

    async def _charge(self, num_bytes: Bytes) -> None:
        # Beside the event loop, which has other files to move meanwhile.
        await asyncio.get_running_loop().run_in_executor(self._executor, self._storage.charge, num_bytes)
