"""A chief, which has the oracle, and workers, which train, by KerasTuner's protocol.

Each is `python -m tuner.search` with the same flags, and with KerasTuner's environment
variables, which say who it is and where the chief listens:

    KERASTUNER_TUNER_ID       "chief", or another name for each worker
    KERASTUNER_ORACLE_IP      address of the chief
    KERASTUNER_ORACLE_PORT    its port

`--workers=2` starts a chief and two workers on this machine. The protocol knows neither
passwords nor encryption: whoever reaches the port can read and change the search.
"""

import concurrent.futures
import ipaddress
import multiprocessing
import os
import socket
import time
import warnings

from recipes import workers

LOOPBACK = "127.0.0.1"
RESTARTS = 10  # of all workers together, before something must be wrong
GOODBYE_SECONDS = 30  # for workers to ask once more, and hear that all is done


def role():
    """`"chief"`, `"worker"`, or `None` outside of a cluster.

    Raises:
        ValueError: If only some of the environment variables are set.
    """
    names = ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT")
    found = {name: os.environ.get(f"KERASTUNER_{name}") for name in names}
    if found["ORACLE_IP"] is None and found["ORACLE_PORT"] is None:
        return None
    if missing := [f"KERASTUNER_{name}" for name in names if not found[name]]:
        raise ValueError(
            "A cluster needs the environment variables "
            f"{', '.join(f'KERASTUNER_{name}' for name in names)}. "
            f"Missing: {', '.join(missing)}"
        )
    return "chief" if "chief" in found["TUNER_ID"] else "worker"


def serve(oracle):
    """Answers workers until the search is complete. Of the chief.

    Args:
        oracle: One of `tuner.oracles`.
    """
    import grpc
    from keras_tuner.src import protos
    from keras_tuner.src.distribute.oracle_chief import OracleServicer

    address, port = (os.environ[f"KERASTUNER_ORACLE_{name}"] for name in ("IP", "PORT"))
    warn_unless_loopback(address)
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=1))
    servicer = OracleServicer(oracle)
    protos.get_service_grpc().add_OracleServicer_to_server(servicer, server)
    server.add_insecure_port(f"{address}:{port}")
    server.start()
    try:
        while not servicer.stop_triggered or oracle.ongoing_trials:
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


def run(function, count, **arguments):
    """Calls `function(**arguments)` as a chief and as workers, on this machine.

    They end with this process. A worker that dies is started again, and goes on with
    its trial.

    Args:
        function: Of a module, so that another process can import it.
        count: Integer, number of workers.
        **arguments: Of the function, which can be pickled.

    Raises:
        RuntimeError: If the chief fails, or workers do too often.
    """
    port = str(_free_port())

    def start(name, **variables):
        variables |= {
            "KERASTUNER_TUNER_ID": name,
            "KERASTUNER_ORACLE_IP": LOOPBACK,
            "KERASTUNER_ORACLE_PORT": port,
        }
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_play, args=(function, arguments), name=name)
        with workers.environment(workers.ENVIRONMENT | variables):
            process.start()
        return process

    chief = start("chief", CUDA_VISIBLE_DEVICES="")  # it trains nothing
    players = [start(f"worker{i}", **_devices(i)) for i in range(count)]
    restarts = 0
    try:
        while chief.is_alive():
            chief.join(0.2)
            for i, player in enumerate(players):
                if player.exitcode:
                    restarts += 1
                    if restarts > RESTARTS:
                        raise RuntimeError(
                            f"Workers failed {restarts} times, see above"
                        )
                    players[i] = start(player.name, **_devices(i))
        if chief.exitcode:
            raise RuntimeError(f"The chief ended with exit code {chief.exitcode}")
        for player in players:
            player.join(GOODBYE_SECONDS)
    finally:
        for process in (chief, *players):
            process.terminate()


def _devices(number):
    """One of the GPUs that CUDA_VISIBLE_DEVICES lists, for a worker."""
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if len(devices) < 2:
        return {}
    return {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}


def _play(function, arguments):
    workers.end_with_parent()
    function(**arguments)


def _free_port():
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        return found.getsockname()[1]
