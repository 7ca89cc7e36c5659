"""The actor runtime: mailboxes, actors, systems, channels, worker threads and what they let one observe.

Public: users write their own tiers and pipeline stages on it.  Runs on asyncio and uvloop; needs no torch.
"""

from hicache_actors.runtime.actor import MESSAGES_PER_TURN, Actor, handles
from hicache_actors.runtime.channels import Receiver, Sender, channel, hand_on
from hicache_actors.runtime.deadlines import Deadline
from hicache_actors.runtime.histogram import Histogram, HistogramSnapshot
from hicache_actors.runtime.loop_lag import LoopLag
from hicache_actors.runtime.mailbox import Mailbox
from hicache_actors.runtime.messages import Ask, Control, Declined, Envelope, Message
from hicache_actors.runtime.observation import (
    ActorSnapshot,
    Failure,
    JobsSnapshot,
    SystemSnapshot,
    WorkersSnapshot,
    bind_log,
    unwrap,
)
from hicache_actors.runtime.shielding import see_through
from hicache_actors.runtime.system import Job, System
from hicache_actors.runtime.workers import Workers

__all__ = [
    "MESSAGES_PER_TURN",
    "Actor",
    "ActorSnapshot",
    "Ask",
    "Control",
    "Deadline",
    "Declined",
    "Envelope",
    "Failure",
    "Histogram",
    "HistogramSnapshot",
    "Job",
    "JobsSnapshot",
    "LoopLag",
    "Mailbox",
    "Message",
    "Receiver",
    "Sender",
    "System",
    "SystemSnapshot",
    "Workers",
    "WorkersSnapshot",
    "bind_log",
    "channel",
    "hand_on",
    "handles",
    "see_through",
    "unwrap",
]
