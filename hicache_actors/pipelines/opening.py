"""Opening: the next chunk of host memory is touched and made known to the device.

    touched, registered -> RESULT (all its pages, or none) -> open on all ranks in the same step, or closed for good

What cannot be had is no failure of the cache, which goes on with the memory that it has; the log says what to change.
"""

from __future__ import annotations

from hicache_actors.core.words import StartOpen
from hicache_actors.errors import ConfigError, StoppedError
from hicache_actors.pipelines.job import OpenJob
from hicache_actors.pipelines.movers import Movers
from hicache_actors.runtime import Workers, bind_log
from hicache_actors.transfer.completions import Completion


async def open_memory(movers: Movers, start: StartOpen, job: OpenJob) -> None:
    log, ended = bind_log(part="host"), Completion()
    pages = range(start.first_page, start.first_page + start.pages)
    workers = Workers("open", 1)  # it takes seconds: the threads that hash have better things to do
    job.hold(ended)
    try:
        await workers.run(movers.host.make_ready, movers.device.device, pages, on_end=ended.finish)
    except ConfigError as error:
        log.error("host_memory_stays_closed", from_page=pages.start, reason=str(error))
    except StoppedError as error:  # the cache is closing
        log.info("host_memory_stays_closed", from_page=pages.start, reason=str(error))
    else:
        job.result(start.pages)
        log.info("host_memory_opened", to_page=pages.stop, of_pages=movers.host.memory.slots)
    finally:
        workers.close()
