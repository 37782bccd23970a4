"""A machine of the local engine: a process that starts actors on this machine, in place of an agent on another machine.

Decides that every actor is a process of its own which ends with this one, and that this one ends with its server. It
reads requests of the server from standard input and writes its answers to standard output (`agents` has their forms).
`flowserve run --cluster local:N` starts N of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import BinaryIO

from flowserve.elsewhere.cluster.agents import ADD, ADDED, ENDED, FAILED, KILL, START, STARTED
from flowserve.elsewhere.cluster.base import ActorJob, InstanceJob
from flowserve.elsewhere.cluster.pipes import Answers, pickled, read_pickled, standard_pipes


class _Machine:
    def __init__(self, answers: Answers) -> None:
        self._tell = answers.tell
        self._actors: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, source: BinaryIO) -> None:
        while (request := read_pickled(source)) is not None:
            kind, number, *arguments = request
            if kind == START:
                threading.Thread(target=self._start, args=(number, *arguments), daemon=True).start()
            elif kind == ADD:
                threading.Thread(target=self._add, args=(number, *arguments), daemon=True).start()
            elif kind == KILL and number in self._actors:
                self._actors[number].kill()
        for actor in [*self._actors.values()]:
            actor.kill()

    def _add(self, number: int, job: InstanceJob) -> None:
        actor = self._actors.get(number)
        try:
            if actor is None or actor.stdin is None:
                raise BrokenPipeError
            actor.stdin.write(pickled(job))
            actor.stdin.flush()
        except (OSError, ValueError):
            self._tell(FAILED, number, "its process has ended")
        else:
            self._tell(ADDED, number)

    def _start(self, number: int, job: ActorJob, *_: object) -> None:
        command = [sys.executable, "-m", "flowserve.elsewhere.cluster.actor"]
        try:
            actor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            return self._tell(FAILED, number, f"a process cannot be started: {error.strerror or error}")
        self._actors[number] = actor
        assert actor.stdin is not None
        assert actor.stdout is not None
        line = b""
        try:
            actor.stdin.write(pickled(job))
            actor.stdin.flush()  # it stays open: the actor ends when it is closed
            line = actor.stdout.readline()
        except OSError:
            pass  # it has ended, which is reported below
        answer, *words = json.loads(line) if line else ("",)
        if answer == STARTED:
            self._tell(STARTED, number, "127.0.0.1", *words, actor.pid)
        elif answer == FAILED:
            self._tell(FAILED, number, *words)
        status = actor.wait()
        self._actors.pop(number, None)
        actor.stdin.close()
        actor.stdout.close()
        how = f"ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        self._tell(ENDED if answer == STARTED else FAILED, number, f"its process {actor.pid} {how}")
        return None


def main() -> None:
    """Serve the requests of standard input until it ends."""
    source, answers = standard_pipes()
    _Machine(answers).run(source)


if __name__ == "__main__":
    main()
