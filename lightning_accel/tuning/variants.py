"""The variants of a search: those that are frozen between measurements, and the servers of their processes."""

import shutil
from functools import partial
from pathlib import Path

from lightning_accel.measure.allocators import AllocatorName
from lightning_accel.tuning.fork_server import ForkServer
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.room import Room
from lightning_accel.tuning.variant import Variant, fork_server


class Variants:
    """Start variants, keep those frozen whose steps are steady, and end them.

    Args:
        project: what is fitted.
        folder: holds the files of all processes, and is removed at the beginning and the end.

    Attributes:
        room: the memory of the machine; None while it is unknown.
    """

    def __init__(self, project: Project, folder: Path) -> None:
        self.project = project
        self.folder = folder
        self.room: Room | None = None
        self._servers: dict[AllocatorName | None, ForkServer | None] = {}
        self._warm: dict[str, tuple[Variant, float]] = {}
        self._number = 0
        _remove(folder)

    def __contains__(self, changes: Changes) -> bool:
        return str(changes) in self._warm

    def new_folder(self) -> Path:
        """Return a path for the files of another variant."""
        self._number += 1
        return self.folder / str(self._number)

    def new(self, changes: Changes) -> Variant:
        """Return a variant that has not been started."""
        return Variant(self.project, changes, self.new_folder(), self.server_for(changes))

    def server_for(self, changes: Changes) -> ForkServer | None:
        """Return the server that forks processes with the allocator that changes name, None if there is none."""
        allocator = changes.speedups.get("allocator")
        if allocator not in self._servers:
            self._servers[allocator] = fork_server(allocator)
        return self._servers[allocator]

    def warm(self, changes: Changes, deadline: float) -> tuple[Variant, float]:
        """Return a frozen variant and how long it took to warm up; one that was used before, if there is one."""
        if changes not in self:
            variant = self.new(changes)
            variant.before_turn = partial(self._prepare, variant)
            self.make_room(changes)
            try:
                variant.start()
                self._warm[str(changes)] = (variant, variant.warm_up(deadline))
            except BaseException:
                variant.stop()
                raise
        return self._warm[str(changes)]

    def fit_together(self, *changes: Changes) -> bool:
        """Return whether variants need not start again for each turn."""
        return self.room is None or self.room.is_enough_for(changes)

    def make_room(self, changes: Changes) -> None:
        """Put frozen variants away that leave no memory for another one with changes, the first ones first."""
        frozen = [one for one, _ in self._warm.values() if one.is_alive and not one.is_put_away]
        while frozen and not self.fit_together(changes, *(one.changes for one in frozen)):
            frozen.pop(0).put_away()

    def _prepare(self, variant: Variant, deadline: float) -> None:
        if variant.is_put_away:
            self.make_room(variant.changes)
            variant.restart(self.new_folder(), deadline)

    def forget(self, changes: Changes) -> None:
        """End a variant, but for the run as it is."""
        if changes != Changes() and changes in self:
            self._warm.pop(str(changes))[0].stop()

    def forget_ended(self) -> None:
        for key, (variant, _) in list(self._warm.items()):
            if not variant.is_alive:
                self._warm.pop(key)[0].stop()

    def has_lost(self, changes: Changes) -> bool:
        """Return whether a frozen variant or a server has ended by itself, and go on without what has."""
        is_lost = changes in self and not self._warm[str(changes)][0].is_alive
        self.forget_ended()
        for allocator, server in self._servers.items():
            if server is not None and server.has_ended:
                server.stop()
                # one that never forked would end again
                self._servers[allocator], is_lost = fork_server(allocator) if server.has_forked else None, True
        return is_lost

    def stop(self) -> None:
        """End everything, and remove the files."""
        for variant, _ in self._warm.values():
            variant.stop()
        for server in filter(None, self._servers.values()):
            server.stop()
        _remove(self.folder)


def _remove(folder: Path) -> None:
    """Remove the files of trials, and the temporary folders that killed processes have left."""
    for path in folder.glob("*/temporary_*.txt"):
        temporary = Path(path.read_text())
        if temporary.name.startswith("pymp-"):
            shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
