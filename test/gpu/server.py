#!/usr/bin/env python3
"""A small model server that holds memory of a real GPU, by PyTorch.

    GET  /health             {"status", "loaded", "gpu_resident_mib"}
    GET  /stats              what was done and how long it took; for the check
    POST /api/admin/load     takes --gib of GPU memory and touches all of it
    POST /api/admin/unload   gives it back to the driver
    POST /work               some milliseconds of work on what it holds

With `--device cpu` it only pretends, for a rehearsal on a machine without a
GPU: it holds a thousandth of the size, needs no PyTorch, and writes what it
would hold into the folder of a simulated GPU (--sim-dir; the format is that of
the Go package gpu/simulated). A simulated card of --sim-total GiB runs out of
memory as a real one does.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MIB = 1 << 20
GIB = 1 << 30
BODY_LIMIT = 1 << 20
WORK_SIZE = 2048  # edge of the matrices that /work multiplies
PRETENDED_STEP = 0.03  # seconds that a pretended load or half an unload takes


class OutOfMemory(Exception):
    """The card has not got as much as a load wants."""


class NotLoaded(Exception):
    """Work came before the model is in the GPU's memory."""


class Cuda:
    """Memory of a real GPU."""

    def __init__(self):
        import torch  # takes seconds, and the rehearsal has none

        self.torch = torch
        self.weights = None
        self.factors = None
        if not torch.cuda.is_available():
            raise SystemExit("server.py: PyTorch sees no GPU; --device cpu pretends")

    def load(self, size):
        torch = self.torch
        try:
            self.weights = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
            self.factors = [
                torch.full((WORK_SIZE, WORK_SIZE), 1 / WORK_SIZE, device="cuda", dtype=torch.float32) for _ in range(2)
            ]
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError as fault:
            self.unload()
            raise OutOfMemory(str(fault)) from fault

    def unload(self):
        self.weights = None
        self.factors = None
        torch = self.torch
        # cuBLAS keeps a workspace of its own in PyTorch's cache.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()

    def work(self):
        torch = self.torch
        try:
            product = self.factors[0] @ self.factors[1]
            first, last = self.weights[0], self.weights[-1]
            return float(product.sum()) * WORK_SIZE / WORK_SIZE**2 + int(first) + int(last)
        except torch.cuda.OutOfMemoryError as fault:
            raise OutOfMemory(str(fault)) from fault

    def resident(self):
        return int(self.torch.cuda.memory_reserved()) if self.weights is not None else 0

    def about(self):
        return "PyTorch %s, CUDA %s" % (self.torch.__version__, self.torch.version.cuda)


class Pretended:
    """Memory of a simulated GPU: a file in a folder, and a thousandth of the size in RAM."""

    def __init__(self, name, folder, total, context):
        self.folder, self.total, self.context, self.name = folder, total, context, name
        self.weights = None
        self.held = 0
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            self.start = file.read().rpartition(")")[2].split()[19]

    def load(self, size):
        want = size + self.context  # the context stays when the weights go, as CUDA's does
        if self.folder and self.total and self._others() + want > self.total:
            raise OutOfMemory(
                "CUDA out of memory (simulated): tried to allocate %d MiB of %d MiB, others hold %d MiB"
                % (want // MIB, self.total // MIB, self._others() // MIB)
            )
        time.sleep(PRETENDED_STEP)
        self.weights = bytearray(b"\x01") * max(1, size // 1024)
        self._hold(want)

    def unload(self):
        time.sleep(PRETENDED_STEP)
        self.weights = None
        if self.held:
            self._hold(self.context)
        time.sleep(PRETENDED_STEP)

    def work(self):
        deadline = time.monotonic() + 0.003
        while time.monotonic() < deadline:
            checksum = sum(self.weights[:4096]) // 4096
        return float(checksum + self.weights[0] + self.weights[-1])

    def resident(self):
        return self.held if self.weights is not None else 0

    def about(self):
        return "pretended, no PyTorch"

    def _others(self):
        held = 0
        for entry in os.listdir(self.folder):
            if entry.split("-")[0].isdigit() and not entry.startswith("%d-" % os.getpid()):
                with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, entry), encoding="utf-8") as file:
                    held += sum(int(line.split()[1]) for line in file if not line.startswith("#"))
        return held

    def _hold(self, size):
        self.held = size
        if not self.folder:
            return
        path = os.path.join(self.folder, "%d-%s" % (os.getpid(), self.name))
        if not size:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
            return
        temporary = os.path.join(self.folder, ".%d-%s.tmp" % (os.getpid(), self.name))
        with open(temporary, "w", encoding="utf-8") as file:
            file.write("#start %s\n#name %s\n0 %d\n" % (self.start, self.name, size))
        os.replace(temporary, path)


class Model:
    """What the server does, one thing at a time, and how long it took."""

    def __init__(self, memory, size):
        self.memory, self.size = memory, size
        self.lock = threading.Lock()
        self.loaded = False
        self.stats = {
            "pid": os.getpid(),
            "about": memory.about(),
            "loads": 0,
            "unloads": 0,
            "works": 0,
            "ooms": 0,
            "cold_works": 0,
            "load_began": 0.0,
            "load_ended": 0.0,
            "unload_began": 0.0,
            "unload_ended": 0.0,
        }

    def health(self):
        # Without the lock: a server that works or loads answers its probes.
        return {"status": "ok", "loaded": self.loaded, "gpu_resident_mib": self.memory.resident() // MIB}

    def load(self):
        with self.lock:
            if self.loaded:
                return self.health()
            began = time.time()
            self.memory.load(self.size)
            self.loaded = True
            self.stats["loads"] += 1
            self.stats["load_began"], self.stats["load_ended"] = began, time.time()
            return self.health()

    def unload(self):
        with self.lock:
            if not self.loaded:
                return self.health()
            began = time.time()
            self.loaded = False
            self.memory.unload()
            self.stats["unloads"] += 1
            self.stats["unload_began"], self.stats["unload_ended"] = began, time.time()
            return self.health()

    def work(self):
        with self.lock:
            if not self.loaded:
                self.stats["cold_works"] += 1
                raise NotLoaded("work came while the model is not loaded")
            began = time.monotonic()
            checksum = self.memory.work()
            self.stats["works"] += 1
            return {"checksum": round(checksum, 3), "ms": round((time.monotonic() - began) * 1000, 3)}

    def told(self):
        with self.lock:
            return dict(self.stats)

    def note_out_of_memory(self):
        with self.lock:
            self.stats["ooms"] += 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"/health": self.server.model.health, "/stats": self.server.model.told})

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") or length > BODY_LIMIT:
            self.close_connection = True
            self.reply(413, {"error": "the body must have a length of at most 1 MiB"})
            return
        self.rfile.read(length)
        model = self.server.model
        self.answer({"/api/admin/load": model.load, "/api/admin/unload": model.unload, "/work": model.work})

    def answer(self, routes):
        act = routes.get(self.path.partition("?")[0])
        if act is None:
            self.reply(404, {"error": "no such route: " + self.path})
            return
        try:
            self.reply(200, act())
        except OutOfMemory as fault:
            self.server.model.note_out_of_memory()
            self.log_message("out of memory: %s", fault)
            self.reply(507, {"error": "out of memory: %s" % fault})
        except NotLoaded as fault:
            self.log_message("%s", fault)
            self.reply(503, {"error": str(fault)})

    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code="-", size="-"):
        if not self.path.startswith(("/health", "/stats")):
            super().log_request(code, size)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    model: Model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gib", type=float, required=True, help="what a load takes of the GPU")
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sim-dir", default="", help="cpu: the folder of the simulated GPU")
    parser.add_argument("--sim-total", type=float, default=0, help="cpu: GiB of the simulated GPU")
    parser.add_argument("--sim-context", type=float, default=0.375, help="cpu: GiB that stay after an unload")
    options = parser.parse_args()

    # SIGTERM ends the program at once; the driver then frees what it holds.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if options.device == "cuda":
        memory = Cuda()
    else:
        memory = Pretended(options.name, options.sim_dir, int(options.sim_total * GIB), int(options.sim_context * GIB))
    server = Server(("127.0.0.1", options.port), Handler)
    server.model = Model(memory, int(options.gib * GIB))
    print("%s serves on port %d: %s" % (options.name, options.port, memory.about()), file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
