"""Trainings side by side, each in a process of its own with one thread."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading

import keras

# A network for small images gains little from a second thread, a second run gains all.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "NPROC": "1",  # XLA
    "TF_CPP_MIN_LOG_LEVEL": "3",  # nothing but the progress bar
}
MOST = 8  # each takes about 1 GB


def default_count():
    """How many: 1 where there is an accelerator, else one for each core, at most 8."""
    try:
        devices = keras.distribution.list_devices()
    except AttributeError:  # PyTorch has none
        devices = []
    if any(not device.startswith("cpu") for device in devices):
        return 1
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
        return min(len(os.sched_getaffinity(0)), MOST)
    return min(os.cpu_count(), MOST)


def each(function, configs, count=None, **arguments):
    """Calls `function(config, **arguments)` for each config, `count` at a time.

    Args:
        function: Of a module, so that another process can import it.
        configs: List of what can be pickled.
        count: Integer; `default_count()` where None. With 1, the calls are made one
            after the other in this process, with all of the machine.
        **arguments: Of the function.

    Yields:
        The place of a config in the list, and what the function returned, as they come.
    """
    count = min(count or default_count(), len(configs))
    if count <= 1:
        for place, config in enumerate(configs):
            yield place, function(config, **arguments)
        return
    with concurrent.futures.ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=end_with_parent
    ) as pool:
        with environment(ENVIRONMENT):  # which the workers inherit
            futures = {
                pool.submit(function, config, **arguments): place
                for place, config in enumerate(configs)
            }
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextlib.contextmanager
def environment(variables):
    """Sets environment variables, for processes that start in this context."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_with_parent():
    """Lets a process that `multiprocessing` started end when its parent does."""
    # Ctrl-C ends a worker at once, and so does the end of the process that started it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
