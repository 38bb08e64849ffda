"""The folders of a run that are of all its machines: refused if they are missing, or hold what cannot be resumed.

Knows no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from capricorn.config.scenario import Scenario
from capricorn.errors import ConfigError, StoreError
from capricorn.runtime.persist.layout import Manifest, folder_of, is_persistent_tier, iterations_in
from capricorn.systems.registry import find
from capricorn.systems.settings import file_settings_of

PERSISTENT: Final = "persistent"
"""The folder in a run folder for its persistent tier, unless that is to be elsewhere."""
TOKEN_PREFIX: Final = ".capricorn-token-"
"""Of a file by which machines find out that they share the folder; a command that was killed leaves it behind."""


def tier_of(scenario: Scenario, run_dir: Path) -> Path | None:
    """Returns the folder of the persistent tier, made in the run's if it is its own; None if there is to be none."""
    if scenario.persist.dir:
        return Path(scenario.persist.dir).resolve()
    if not scenario.persist.every:
        return None
    (own := run_dir / PERSISTENT).mkdir(parents=True)
    return own


def check_tier(scenario: Scenario) -> None:
    """Checks the persistent tier that the user named, and makes its folder if it is not there.

    Raises:
        ConfigError: that is not possible, or it holds something else than checkpoints of the same model, of which there
            is some way left to go.
    """
    if not scenario.persist.dir:
        return
    root = Path(scenario.persist.dir).resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        is_empty = all(each.name.startswith(TOKEN_PREFIX) for each in root.iterdir())
    except OSError as error:
        raise ConfigError(f"--persist-dir {root}: cannot make or read the folder: {error.strerror}") from None
    if not is_empty and not is_persistent_tier(root):
        raise ConfigError(f"--persist-dir {root} is not empty and holds no checkpoints: name an empty or a new folder")
    for iteration in reversed(iterations_in(root)):
        try:
            found = Manifest.read(folder_of(root, iteration))
        except StoreError:
            continue  # damaged: the ranks will name it, and skip it
        _check_model(found, scenario, root)
        return


def _check_model(found: Manifest, scenario: Scenario, root: Path) -> None:
    if found.model not in ("", scenario.model.name):
        raise ConfigError(
            f"--persist-dir {root} holds checkpoints of {found.model}, not of {scenario.model.name}; name another"
        )
    if found.iteration >= scenario.train.iterations:
        raise ConfigError(
            f"--persist-dir {root} holds iteration {found.iteration}, and training ends with "
            f"{scenario.train.iterations}: ask for more --iterations, or name another folder"
        )


def check_shared_dir(scenario: Scenario) -> None:
    """Checks that what several machines write as files has a folder that all of them share.

    Raises:
        ConfigError: none is named, or the system keeps its files in the memory of one machine.
    """
    if not scenario.launch.nnodes or scenario.launch.nnodes == 1:
        return
    name, writes_files = scenario.system.name, find(scenario.system.name).writes_files
    if writes_files and file_settings_of(scenario).in_memory:
        raise ConfigError(
            f"system.options.medium=tmpfs: memory is of one machine; {name} takes medium=disk with --nnodes"
        )
    needs = f"system {name} writes files" if writes_files else ""
    if scenario.persist.every and not scenario.persist.dir:
        needs = "--persist-every keeps checkpoints on disk"
    if needs and not scenario.launch.shared_dir:
        raise ConfigError(f"{needs}, which all machines need: name a folder that they share by --shared-dir PATH")
