"""What is kept of a run, by rule: every seal and outcome; the means since the state before the last; few offers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import step_of
from composer_replication.diloco.rounds.records import Layout

KEPT_STATES = 2
_STEP = re.compile(r"/(\d{8})/")


class Retention:
    """Deletes what nobody can need any more. Run by the first member, so that not everybody lists and deletes.

    The shards of offers go after `keep_rounds` commits: they are needed to compute a damaged mean again. The means stay
    as long as a replica may have to follow them: from the older of the two newest states on.
    """

    def __init__(self, layout: Layout, keep_rounds: int) -> None:
        self._layout, self._keep_rounds = layout, keep_rounds
        self._offers_from = self._means_from = -1  # not looked at yet

    def sweep(self, store: PatientStore, step: int, names: Sequence[str]) -> None:
        """Delete what a replica at this step leaves behind. `names` are the states that can be read, newest first."""
        for name in names[KEPT_STATES:]:
            store.delete([self._layout.key("states", name), *store.keys(self._layout.key("statedata", name))])
        kept_names = names[:KEPT_STATES]
        if self._offers_from < 0:
            self._offers_from = self._oldest(store)
            self._means_from = max(0, self._offers_from - 1)
        offers_until = step - self._keep_rounds
        means_until = min(offers_until, step_of(kept_names[-1])) if kept_names else offers_until - self._keep_rounds
        for old in range(self._offers_from, offers_until):
            store.delete(store.keys(self._layout.shards(old)))
        for old in range(self._means_from, means_until):
            store.delete(store.keys(self._layout.round(old, "mean")))
        self._offers_from = max(self._offers_from, offers_until)
        self._means_from = max(self._means_from, means_until)

    def _oldest(self, store: PatientStore) -> int:
        """The first round of which there are shards: what was before, an earlier first member has swept."""
        keys = store.keys(self._layout.key("d"))
        match = _STEP.search(keys[0].removeprefix(self._layout.key("d"))) if keys else None
        return int(match[1]) if match else 0
