"""The section `rollout` of a configuration: running ahead, replay, and the storage of rollouts."""

from __future__ import annotations

import attrs

from rlsdk.components import Use
from rlsdk.config import defaults
from rlsdk.config.section import Section, used
from rlsdk.plugins import short_name


@attrs.frozen(kw_only=True)
class ReplaySection(Section):
    """Groups that are trained more than once.

    Attributes:
        share: Share of a batch to fill with groups trained before, as far as any are within the staleness limit.
        most_uses: Maximum number of times that a group is trained in total.
    """

    share: float = 0.0
    most_uses: int = 2

    def fresh(self, batch: int) -> int:
        """Return the number of groups in a batch that are trained for the first time."""
        return batch - round(batch * self.share)


@attrs.frozen(kw_only=True)
class StorageSection(Section):
    """The database that keeps rollouts.

    Attributes:
        url: PostgreSQL URL, `postgresql+psycopg://USER@HOST/NAME`, without a password; null is an SQLite file in the
            run's folder.
        password_env: Name of the environment variable that holds the password, which never belongs in a config.
    """

    url: str | None = None
    password_env: str | None = None


@attrs.frozen(kw_only=True)
class RolloutSection(Section):
    """Limits on how far rollouts run ahead of training; by default they do not, and training is synchronous.

    Attributes:
        max_staleness: Maximum number of weight syncs that a group may be behind when it is trained; 1: the next batch
            is sampled while the learner works on this one. Older groups are sampled again, never trained.
        sync_interval: Steps between two weight syncs.
        oversample: Extra tasks that run at once, as a share of a batch; their groups go into later batches.
        dynamic_sampling: Start another task for each group that a filter drops, so that every batch is full.
        buffer: Priority of the available groups: which are trained first, and which never.
        replay: Groups that are trained more than once.
        storage: Database of rollouts (`save_rollouts` selects which are saved).
        in_flight: Replace weights while answers continue to be sampled; false: they are interrupted first.
        partial_rollouts: Resume an interrupted answer from the tokens already sampled; false: restart it.
        max_token_staleness: Maximum number of weight syncs that a token may be behind; older tokens are left out of the
            loss. null: as for its group.
        tail_batch: Number of expired groups of a source to collect before sampling them again, ahead of all others and
            without `oversample`; 0: each is sampled again at once; -1: never, and its task counts as filtered.
        stop: Rule that decides when enough of a batch is complete; the remaining groups go into later batches.
        weight_transfer: How weights travel from the learner to the engines.
        pause_timeout: Seconds that rollouts have to finish at the end of a run before they are cancelled.
        workers: Processes that run workflows, chats and scoring, on the nodes of the engines; 0: the driver's own
            process does.
    """

    max_staleness: int = 0
    sync_interval: int = 1
    oversample: float = 0.0
    dynamic_sampling: bool = False
    buffer: Use = attrs.field(default=defaults.BUFFER, converter=used)
    replay: ReplaySection = ReplaySection()
    storage: StorageSection = StorageSection()
    in_flight: bool = True
    partial_rollouts: bool = True
    max_token_staleness: int | None = None
    tail_batch: int = 0
    stop: Use = attrs.field(default=defaults.STOP, converter=used)
    weight_transfer: Use = attrs.field(default=defaults.TRANSFER, converter=used)
    pause_timeout: float = 5.0
    workers: int = 0

    @property
    def runs_ahead(self) -> bool:
        """True if groups may be sampled with older weights than those being trained."""
        other_stop = short_name(self.stop.name) != defaults.STOP.name  # the default waits for the whole batch
        return bool(self.max_staleness or self.sync_interval > 1 or self.oversample or other_stop)
