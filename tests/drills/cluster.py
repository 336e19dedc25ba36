"""Two processes on a host each, network namespaces, and the link between them."""

import os
import re
import subprocess
import sys
import time

from launching import ROOT

OWN_STEPS = ROOT / "tests" / "drills" / "own_steps.py"


class Cluster:
    """A command whose two processes are on a host each, and the link between them."""

    def __init__(self, hosts, folder, command, env=None):
        self.hosts = hosts
        self.outputs = [folder / f"{i}.txt" for i in range(2)]
        self.processes = []
        for i, (host, output) in enumerate(zip(hosts, self.outputs, strict=True)):
            coordinator = f"{hosts[0].address}:29500"
            flags = "--coordinator", coordinator, "--processes", 2, "--process", i
            with output.open("wb") as file:
                started = subprocess.Popen(
                    host.command([*map(str, (sys.executable, *command, *flags))]),
                    cwd=ROOT,
                    env=os.environ | (env or {}),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(started)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait(10)

    def until(self, reached):
        while not reached():
            assert all(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.01)

    def end(self):
        return [process.wait(120) for process in self.processes]

    def link(self, up):
        switch = re.sub(r"-h\d+$", "-switch", self.hosts[1].name)
        how = ("master", "bridge") if up else ("nomaster",)
        command = ("ip", "-n", switch, "link", "set", "port1", *how)
        subprocess.run(command, check=True)

    def said(self):
        return [re.split(r"[\r\n]+", o.read_text().strip()) for o in self.outputs]
