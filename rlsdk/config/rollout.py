"""The `rollout` section of a configuration: staleness, replay, and the storage of rollouts."""

from __future__ import annotations

import attrs

from rlsdk.components import Use
from rlsdk.config import defaults
from rlsdk.config.section import Section, used, used_or_none
from rlsdk.plugins import short_name


@attrs.frozen(kw_only=True)
class ReplaySection(Section):
    """Groups that are trained more than once.

    Attributes:
        share: Share of a batch to fill with previously trained groups that are within the staleness limit.
        most_uses: Maximum number of times a group is trained, the first included.
    """

    share: float = 0.0
    most_uses: int = 2

    def fresh(self, batch: int) -> int:
        """Return the number of groups in a batch that are trained for the first time."""
        return batch - round(batch * self.share)


@attrs.frozen(kw_only=True)
class StorageSection(Section):
    """The database of rollouts.

    Attributes:
        url: PostgreSQL URL, `postgresql+psycopg://USER@HOST/NAME`, without a password; null uses an SQLite file in the
            run's folder.
        password_env: Environment variable that holds the password, which does not belong in a config.
    """

    url: str | None = None
    password_env: str | None = None


@attrs.frozen(kw_only=True)
class RolloutSection(Section):
    """How far rollouts may run ahead of training; by default not at all: training is synchronous.

    Attributes:
        max_staleness: Maximum number of weight syncs that a group may lag behind when it is trained; with 1, the next
            batch is sampled while the learner trains on the current one. Older groups are sampled again, never trained.
        sync_interval: Steps between weight syncs.
        oversample: Extra tasks to run concurrently, as a share of a batch; their groups go into later batches.
        dynamic_sampling: Replace each group that a filter drops by a new task, so that every batch is full.
        sampler: Chooses the next task of each source of `tasks.train`, by what it has seen of earlier ones; null: all
            tasks in each epoch, in random order unless the source keeps its own.
        buffer: Selects which available groups are trained first, and which are dropped.
        replay: Groups that are trained more than once.
        storage: Database of rollouts (`save_rollouts` selects which are saved).
        in_flight: Update weights while answers are being sampled; if false, sampling is interrupted first.
        partial_rollouts: Resume an interrupted answer from the tokens already sampled; if false, restart it.
        max_token_staleness: Maximum number of weight syncs that a token may lag behind; older tokens are masked out of
            the loss. null: the limit of its group.
        tail_batch: Number of expired groups of a source to collect before they are sampled again, ahead of all others
            and without `oversample`; 0: sample each again at once; -1: never; its task counts as filtered.
        stop: Rule that decides when enough of a batch is complete; the remaining groups go into later batches.
        weight_transfer: How weights are sent from the learner to the engines.
        pause_timeout: Seconds to wait for running rollouts at the end of a run before they are cancelled.
        workers: Rollout worker processes, on the engines' nodes, that run workflows, chats and scoring; 0 runs them in
            the driver.
    """

    max_staleness: int = 0
    sync_interval: int = 1
    oversample: float = 0.0
    dynamic_sampling: bool = False
    sampler: Use | None = attrs.field(default=None, converter=used_or_none)
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
