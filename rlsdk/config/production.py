"""The section `production` of a run: how far rollouts may run ahead, what is trained first, and where it is kept."""

from __future__ import annotations

import attrs

from rlsdk.components import Use


@attrs.frozen(kw_only=True)
class ReplaySection:
    """Groups that are trained more than once.

    Attributes:
        share: Of a batch: that many of its groups were trained before, as far as there are any that are young enough.
        most_uses: Times that a group is trained in all.
    """

    share: float = 0.0
    most_uses: int = 2

    def fresh(self, batch: int) -> int:
        """Groups of a batch that are trained for the first time."""
        return batch - round(batch * self.share)


@attrs.frozen(kw_only=True)
class StorageSection:
    """The database that keeps rollouts.

    Attributes:
        url: Of a PostgreSQL database, `postgresql+psycopg://USER@HOST/NAME`, without a password; null is a file of
            SQLite in the run's folder.
        password_env: Name of the environment variable that holds the password; the password itself belongs into no
            config.
    """

    url: str | None = None
    password_env: str | None = None


@attrs.frozen(kw_only=True)
class ProductionSection:
    """How far rollouts may run ahead of training; with the defaults they do not, and training is synchronous.

    Attributes:
        max_staleness: Syncs of weights that a group may lie behind when it is trained; 1: the next batch is made while
            the learner works on this one. What is older is made again, never trained.
        sync_interval: Steps between two syncs.
        oversample: Tasks that run beside those that a batch wants, as a share of it; their groups are for the next.
        dynamic_sampling: Start another task for each group that a filter leaves out, so that every batch is full.
        buffer: Which of the groups that are there are trained first, and which never.
        replay: Groups that are trained more than once.
        storage: Where rollouts are kept (`save_rollouts` says which).
        in_flight: Replace weights while answers are being sampled, which go on; false: they are ended first.
        partial_rollouts: Go on with an ended answer from the tokens that are there; false: it begins anew.
        max_token_staleness: Syncs that a token may lie behind; older ones are left out of the loss. null: as its group.
        tail_batch: Expired groups of a source that are collected, and then made again before all others and without
            `oversample`; 0: each is made again at once; -1: none is, and its task counts as filtered.
        stop: Which part of a batch is enough to go on with; the rest is for the next batches.
        pause_timeout: Seconds that rollouts have to end in at the end of a run; then they are cancelled.
    """

    max_staleness: int = 0
    sync_interval: int = 1
    oversample: float = 0.0
    dynamic_sampling: bool = False
    buffer: Use = Use("fifo")
    replay: ReplaySection = ReplaySection()
    storage: StorageSection = StorageSection()
    in_flight: bool = True
    partial_rollouts: bool = True
    max_token_staleness: int | None = None
    tail_batch: int = 0
    stop: Use = Use("all")
    pause_timeout: float = 5.0

    @property
    def runs_ahead(self) -> bool:
        """Whether groups may be made by older weights than those that are trained."""
        part = self.stop.name not in ("all", "core/all")
        return bool(self.max_staleness or self.sync_interval > 1 or self.oversample or part)
