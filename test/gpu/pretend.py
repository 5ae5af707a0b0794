#!/usr/bin/env python3
"""What stands for the driver in `run.sh --rehearse-nvml`.

    pretend.py nvml STATE   keeps the state file of the stub of NVML
                            (nvml/testdata/nvml-stub.c) as the servers' files say
    pretend.py smi ...      answers as nvidia-smi does, of the same files

$PRETEND_DIR is the folder of the servers' files (as server.py writes them),
$PRETEND_TOTAL the card's memory in MiB.
"""

import os
import sys
import time

UUID = "GPU-00000000-0000-0000-0000-0000000000aa"
DRIVER = "999.00-stub"
NAME = "Stub GPU"
RESERVED = 300  # MiB that the driver keeps
INTERVAL = 0.005


def processes():
    """MiB held, by PID, of the processes that live."""
    held = {}
    for entry in sorted(os.listdir(os.environ["PRETEND_DIR"])):
        pid = entry.split("-")[0]
        if not pid.isdigit() or not os.path.exists("/proc/" + pid):
            continue
        try:
            with open(os.path.join(os.environ["PRETEND_DIR"], entry), encoding="utf-8") as file:
                size = sum(int(line.split()[1]) for line in file if not line.startswith("#"))
        except FileNotFoundError:
            continue
        held[int(pid)] = size >> 20
    return held


def keep(path):
    total = int(os.environ["PRETEND_TOTAL"])
    before = None
    while True:
        held = processes()
        if held != before:
            before = held
            lines = ["driver %s" % DRIVER, "gpu %s %d %d %d 10 40 60000 0" % (UUID, total, RESERVED, sum(held.values())), "name 0 %s" % NAME]
            lines += ["proc 0 %d %d" % item for item in held.items()]
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
            os.replace(path + ".tmp", path)
        time.sleep(INTERVAL)


def answer(arguments):
    total = int(os.environ["PRETEND_TOTAL"])
    held = processes()
    used = sum(held.values())
    known = {
        "index": 0,
        "uuid": UUID,
        "name": NAME,
        "pci.bus_id": "00000000:01:00.0",
        "driver_version": DRIVER,
        "memory.total": total,
        "memory.used": used,
        "memory.free": total - RESERVED - used,
        "memory.reserved": RESERVED,
        "utilization.gpu": 10,
        "temperature.gpu": 40,
        "power.draw": "60.00",
        "mig.mode.current": "[N/A]",
    }
    for argument in arguments:
        option, _, fields = argument.partition("=")
        if option == "--query-gpu":
            unknown = [field for field in fields.split(",") if field not in known]
            if unknown:
                print('Field "%s" is not a valid field to query.' % unknown[0])
                return 2
            print(", ".join(str(known[field]) for field in fields.split(",")))
        elif option == "--query-compute-apps":
            for pid, size in held.items():
                print("%s, %d, %s, %d" % (UUID, pid, "python3", size))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["nvml"]:
        keep(sys.argv[2])
    sys.exit(answer(sys.argv[2:]))
