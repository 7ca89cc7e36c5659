"""What is really where, and a Core that is heard: a directory by its events alone is compared with it after every section."""

from __future__ import annotations

from hicache_actors.core import Core, CoreConfig
from hicache_actors.core.check import nodes_of
from hicache_actors.core.node import STORED
from hicache_actors.core.records import Changed
from hicache_actors.core.words import DEVICE, HOST, READY, Effect
from hicache_actors.events import Directory, EventBatch, Mirror, TierName
from hicache_actors.keys.hashes import page_hashes

EVERYTHING = 1 << 30


def really(core: Core) -> dict[TierName, set[bytes]]:
    """Read off Core's tree, and hashed from the tokens of each path."""
    tree = core.state.tree
    pages: dict[TierName, set[bytes]] = {"device": set(), "host": set(), "storage": set()}
    for node in nodes_of(core.state):
        own = page_hashes(tree.path_tokens(node), tree.scope_of(node), core.page_size)[tree.start(node) :]
        if node.at[DEVICE].state == READY:
            pages["device"].update(own)
        if node.at[HOST].state == READY:
            pages["host"].update(own)
        if node.stored == STORED:
            pages["storage"].update(own)
    return pages


class HeardCore(Core):
    """Is watched from its section ``start`` on, and has ``nodes`` of what it holds then told in each."""

    start, nodes = 0, EVERYTHING

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.sections = 0
        self.mirror, self.directory = Mirror(config.page_size), Directory()
        self.batches: list[EventBatch] = []

    def take_effects(self) -> list[Effect]:
        if self.sections == self.start:
            self.watch(True)
        self.sections += 1
        if self.sections > self.start and not self.mirror.complete:
            self.tell(self.nodes)
        effects = super().take_effects()
        for effect in effects:
            if isinstance(effect, Changed):
                assert effect is effects[-1]
                self._hear(effect)
        if self.mirror.complete:
            self._must_be_right()
        return effects

    def _hear(self, effect: Changed) -> None:
        began = self.mirror.complete
        batch = self.mirror.apply(effect)
        if self.mirror.complete and not began:
            self.directory.apply(self.mirror.snapshot())
        elif batch is not None:
            self.batches.append(batch)
            self.directory.apply(batch)

    def _must_be_right(self) -> None:
        real, told = really(self), self.directory.pages
        assert told["device"] == real["device"]
        assert told["host"] == real["host"]
        assert told["storage"] >= real["storage"], "what leaves the tree stays there"
        late = Directory()
        late.apply(self.mirror.snapshot())
        assert late.pages == real
