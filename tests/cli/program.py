"""The program kda from outside: exit codes, messages, files and JSON. What its tests share."""

import contextlib
import json
import os
import pathlib
import struct
import subprocess
import tempfile
import unittest

import case_files

PROGRAM = os.environ["KDA_PROGRAM"]
DATA = pathlib.Path(__file__).parent.parent / "data"
OUTPUTS = ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"]


def environment_with(**variables):
    """The environment, of the variables that choose for the library only those given."""
    environment = dict(os.environ, **variables)
    for name in {"KDA_IMPL", "KDA_WORKSPACE_LIMIT"} - set(variables):
        environment.pop(name, None)
    return environment


def kda(*arguments, variables=None, **how):
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment_with(**(variables or {})),
        check=False,
        **how,
    )


def read_header(path):
    content = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enter(tempfile.TemporaryDirectory()))
        self.case = self.folder / "case.safetensors"
        self.out = self.folder / "out.safetensors"

    def enter(self, context):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        return stack.enter_context(context)

    def write_case(self, **changes):
        tensors = case_files.with_gradients(case_files.small_tensors())
        tensors.update({name.replace("__", "."): value for name, value in changes.items()})
        self.case.write_bytes(case_files.case(tensors))

    def files(self):
        return sorted(path.name for path in self.folder.iterdir())

    def check(self, result, code):
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)

    def lines(self, result):
        return [json.loads(line) for line in result.stdout.splitlines()]
