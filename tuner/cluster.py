"""A chief, which has the oracle, and workers, which train, by KerasTuner's protocol.

Each is `python -m tuner.search` with the same flags, and with KerasTuner's environment
variables, which say who it is and where the chief listens (docs/tuning.md). With
`--workers=2` a search is the chief of two workers, which it starts on this machine.
"""

import concurrent.futures
import ipaddress
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings

import keras_tuner

from recipes.engine import workers
from recipes.engine.errors import UserError
from recipes.engine.run import differences

# "chief" or the name of a worker, and the address and the port of the chief.
VARIABLES = [f"KERASTUNER_{key}" for key in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT")]
LOOPBACK = "127.0.0.1"
SETTINGS = "settings"  # the name under which `tell` keeps them
RESTARTS = 10  # of all workers together, before something must be wrong
FATAL = 70  # exit status of a worker whose error would meet every trial
GOODBYE_SECONDS = 30  # for workers to ask once more, and hear that all is done


def role():
    """`"chief"`, `"worker"`, or `None` outside of a cluster.

    Raises:
        UserError: If only some of the environment variables are set.
    """
    if all(os.environ.get(name) is None for name in VARIABLES[1:]):
        return None
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise UserError(
            f"A cluster needs the environment variables {', '.join(VARIABLES)}. "
            f"Missing: {', '.join(missing)}"
        )
    return "chief" if "chief" in os.environ[VARIABLES[0]] else "worker"


def tell(oracle, settings):
    """Puts what all trials share where workers find it: into the chief's space.

    It is a value without a hyperparameter: samples depend on the number of those.

    Args:
        oracle: The chief's.
        settings: Dict, in a form JSON can hold.
    """
    oracle.hyperparameters.values[SETTINGS] = json.dumps(settings)


def check(oracle, settings):
    """Raises a UserError if the chief's trials share other settings than these.

    Args:
        oracle: A worker's, `keras_tuner.Tuner.oracle`.
        settings: See `tell`.
    """
    theirs = json.loads(oracle.get_space().values[SETTINGS])
    ours = json.loads(json.dumps(settings))
    if differing := differences(theirs, ours):
        raise UserError(
            "The chief was started with other flags than this worker: "
            f"{differing}. All must have the same"
        )


def serve(oracle, address, port, watch=lambda: None):
    """Answers workers until the search is complete, and calls `watch` meanwhile.

    Raises:
        UserError: If something else has the port, such as another search's chief.
    """
    import grpc
    from keras_tuner.src import protos
    from keras_tuner.src.distribute.oracle_chief import OracleServicer

    warn_unless_loopback(address)
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(max_workers=1),
        # By default, two chiefs can have one port, and a worker gets either of them.
        options=[("grpc.so_reuseport", 0)],
    )
    servicer = OracleServicer(oracle)
    protos.get_service_grpc().add_OracleServicer_to_server(servicer, server)
    try:
        server.add_insecure_port(f"{address}:{port}")
    except RuntimeError as error:
        raise UserError(
            f"The chief cannot listen at {address}:{port}. Give an address of this "
            "machine, and a port that nothing else has, such as another search"
        ) from error
    server.start()
    try:
        while not servicer.stop_triggered or oracle.ongoing_trials:
            watch()
            time.sleep(0.2)
        deadline = time.monotonic() + GOODBYE_SECONDS
        while oracle.tuner_ids and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        server.stop(grace=1).wait()


def warn_unless_loopback(address):
    """Warns where others than this machine may reach the chief."""
    try:
        local = ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        local = False
    if not local:
        warnings.warn(
            f"The chief listens at {address} without authentication or encryption. "
            "Whoever reaches the port can read and change the search: let a firewall, "
            "a private network or an SSH tunnel keep others out.",
            stacklevel=2,
        )


def run(oracle, count, function, *arguments):
    """Starts workers on this machine, which call a function, and is their chief.

    They end with this process. A worker that dies is started again, and continues its
    trial. The function must be in a module: other processes import it.

    Raises:
        RuntimeError: If workers fail too often, or a trial ends with an error.
    """
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        port = str(found.getsockname()[1])  # a free one
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    spawn = multiprocessing.get_context("spawn")
    players, failures = [], 0

    def start(number):
        variables = dict(zip(VARIABLES, (f"worker{number}", LOOPBACK, port)))
        if len(devices) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        process = spawn.Process(target=_play, args=(function, arguments))
        with workers.environment(workers.ENVIRONMENT | variables):
            process.start()
        return process

    def watch():
        nonlocal failures
        players.extend(start(number) for number in range(len(players), count))
        for number, player in enumerate(players):
            if player.exitcode == FATAL:
                raise RuntimeError(
                    "A trial ended with an error, see above. Fix it, and run the same "
                    "command again to continue"
                )
            if player.exitcode:
                failures += 1
                if failures > RESTARTS:
                    raise RuntimeError(f"Workers failed {failures} times, see above")
                players[number] = start(number)

    try:
        serve(oracle, LOOPBACK, port, watch)
        for player in players:
            player.join(GOODBYE_SECONDS)
    finally:
        for player in players:
            player.terminate()


def _play(function, arguments):
    workers.end_with_parent()
    try:
        function(*arguments)
    except keras_tuner.errors.FatalRuntimeError:
        traceback.print_exc()
        sys.exit(FATAL)
