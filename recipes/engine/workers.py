"""Trainings in parallel, each in its own process with one thread."""

import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading

import keras

# A network for small images gains little from a second thread; a second run uses it.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "NPROC": "1",  # XLA
    # As `command.keep_freed_memory`.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # nothing but the progress bar
}
MOST = 8  # each takes about 1 GB


def default_count():
    """How many jobs at a time: 1 on an accelerator, else one a core, at most 8."""
    if keras.backend.backend() == "torch":  # Keras does not list its devices
        import torch

        devices = ["cuda"] * torch.cuda.device_count()
    else:
        devices = keras.distribution.list_devices()
    if any(not device.startswith("cpu") for device in devices):
        return 1
    return min(cores(), MOST)


def cores():
    """How many cores this process may use; all, if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def each(function, jobs, program, count):
    """Calls `function(job)` for each job, `count` at a time.

    Jobs of one program share one process, unless another would be idle: compiling a
    small network takes longer than training it.

    Args:
        function: Module-level function, which another process can import.
        jobs: List of what can be pickled.
        program: Function of a job that returns a hashable value, equal for jobs that
            are compiled once.
        count: Integer. With 1, the calls are made one after the other in this process,
            which has the whole machine.

    Yields:
        A job and what the function returned, in the order in which jobs end.

    Raises:
        RuntimeError: If a process is killed. This, or any error in the function, ends
            all processes.
    """
    waiting = collections.defaultdict(collections.deque)
    for job in jobs:
        waiting[program(job)].append(job)
    if count <= 1:
        for job in itertools.chain(*waiting.values()):
            yield job, function(job)
        return
    others = set(multiprocessing.active_children())
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(_pool()) for _ in range(count)]
        last = [None] * count  # the program of each pool
        running, idle = {}, list(range(count))
        try:
            while waiting or running:
                while idle and waiting:
                    pool = idle.pop(0)
                    last[pool] = _next(waiting, last, pool)
                    job = waiting[last[pool]].popleft()
                    if not waiting[last[pool]]:
                        del waiting[last[pool]]
                    with environment(ENVIRONMENT):  # a new worker inherits it
                        running[pools[pool].submit(function, job)] = pool, job
                done, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    pool, job = running.pop(future)
                    idle.append(pool)
                    yield job, future.result()
        except BaseException as error:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            # Otherwise this process would wait for them, maybe for hours.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, concurrent.futures.BrokenExecutor):
                raise RuntimeError(
                    "A training process was killed, perhaps because memory ran out. "
                    "Run the same command again to continue, with fewer --workers if "
                    "memory is short"
                ) from error
            raise


def _next(waiting, last, pool):
    """A pool's next program: its own, else a free one, else the one with most jobs."""
    if last[pool] in waiting:
        return last[pool]
    return max(waiting, key=lambda key: (key not in last, len(waiting[key])))


def _pool():
    return concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=end_with_parent
    )


@contextlib.contextmanager
def environment(variables):
    """Sets environment variables for processes that start in this context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_with_parent():
    """Lets a process that `multiprocessing` started end when its parent does."""
    # Ctrl-C ends a worker at once, as does the end of the process that started it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
