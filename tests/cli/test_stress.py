"""kda stress."""

import re
import signal
import subprocess
import time

from program import DATA, PROGRAM, ProgramTest, environment_with, kda


def begin(*arguments):
    """kda stress on the CPU, once it has computed something."""
    process = subprocess.Popen(
        [PROGRAM, "stress", "--device", "cpu", *map(str, arguments)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment_with(KDA_LOG="exec"))
    process.stderr.readline()
    return process


def end(process):
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Stress(ProgramTest):
    def test_a_seed_is_a_list_of_problems(self):
        first, second = (kda("stress", "--seed", "4", "--problems", "12", "--device", "cpu",
                             "--json") for _ in range(2))
        self.check(first, 0)
        (summary,) = self.lines(first)
        self.assertGreater(summary.pop("seconds"), 0)
        self.assertEqual(summary["command"],
                         "kda stress --seed 4 --problems 12 --device cpu --json")
        self.assertEqual(list(summary["machine"]), ["cpu"])
        (again,) = self.lines(second)
        again.pop("seconds")
        for end in (summary, again):
            self.assertRegex(end.pop("date"), r"\A20\d\d-\d\d-\d\dT")
        self.assertEqual(summary, again)
        self.assertEqual([summary["seed"], summary["problems"], summary["failures"]], [4, 12, 0])
        rows = summary["implementations"]
        self.assertEqual(summary["calls"], sum(row["calls"] for row in rows))
        # Every problem is one that the reference takes.
        tried = sum(row["calls"] for row in rows if row["impl"].startswith("reference_"))
        self.assertEqual(tried, 12)

    def test_each_row_gets_a_share_of_the_calls(self):
        result = kda("stress", "--seed", "4", "--problems", "60", "--device", "cpu", "--impl",
                     "cpu", "--json")
        self.check(result, 0)
        (summary,) = self.lines(result)
        self.assertEqual(summary["problems"], 60)
        calls = {row["impl"]: row["calls"] for row in summary["implementations"]}
        self.assertEqual(len(calls), 11)
        self.assertGreaterEqual(min(calls.values()), 2, calls)

    def test_one_problem_can_be_repeated(self):
        ask = ("stress", "--seed", "4", "--case", "3", "--device", "cpu")
        result = kda(*ask, "--impl", "reference")
        self.check(result, 0)
        self.assertRegex(result.stdout, r"\Aright: reference_[a-z_]+ on cpu: ")
        self.assertIn("1 problems, 1 calls, 0 failures", result.stdout)
        self.check(kda(*ask, "--impl", "reference", "--threads", "2"), 0)

    def test_commands_of_the_page_find_something_to_try(self):
        page = (DATA.parents[1] / "docs" / "program.md").read_text()
        commands = re.findall(r"^kda (stress .*--device cpu.*)$", page, re.MULTILINE)
        self.assertTrue(commands)
        for command in commands:
            with self.subTest(command):
                self.check(kda(*command.split("#")[0].split()), 0)

    def test_a_problem_that_nothing_takes_is_exit_3(self):
        for number in range(20):
            result = kda("stress", "--seed", "4", "--case", number, "--device", "cpu", "--impl",
                         "cpu_gate_cumsum")
            if result.returncode == 3:
                self.assertIn("nothing of the choice takes ", result.stdout)
                return
            self.check(result, 0)
        self.fail("every problem was one for cpu_gate_cumsum")

    def test_nothing_to_try_is_exit_3(self):
        (report,) = self.lines(kda("doctor", "--device", "cpu", "--json"))
        built = {row["family"] for row in self.lines(kda("support", "--json"))}
        if report["cuda"] == "usable" or "cuda" not in built:
            self.skipTest("this needs a build with CUDA where CUDA cannot be used")
        result = kda("stress", "--impl", "cuda", "--problems", "1")
        self.check(result, 3)
        self.assertEqual(result.stderr, "kda: --impl: found cuda, which runs on CUDA alone: "
                         + report["cuda"] + "\n")

    def test_a_run_that_tested_nothing_is_exit_3(self):
        for number in range(1, 20):
            result = kda("stress", "--seed", number, "--problems", "1", "--device", "cpu", "--impl",
                         "cpu_recurrent")
            if result.returncode == 3:
                self.assertIn("0 calls", result.stdout)
                self.assertIn("kda: nothing was tested: ", result.stderr)
                return
            self.check(result, 0)
        self.fail("every first problem was one for cpu_recurrent")

    def test_it_ends_in_time(self):
        start = time.monotonic()
        result = kda("stress", "--seconds", "0.5", "--device", "cpu", "--json")
        self.check(result, 0)
        self.assertLess(time.monotonic() - start, 60)
        self.assertGreater(self.lines(result)[-1]["problems"], 0)

    def test_a_choice_without_words_is_none(self):
        everything = kda("support", "--device", "cpu").stdout
        for choice in (",", " ", ", ,"):
            with self.subTest(choice):
                result = kda("stress", "--problems", "1", "--device", "cpu", "--impl", choice)
                self.check(result, 0)
                self.assertIn("1 problems, 2 calls", result.stdout)
                listed = kda("support", "--device", "cpu", "--impl", choice)
                self.assertEqual(listed.stdout, everything)

    def test_words_may_stand_between_spaces(self):
        ask = ("support", "--device", "cpu", "--json", "--impl")
        spaced, plain = (kda(*ask, choice).stdout for choice in
                         (" cpu_wu reference_wu,", "cpu_wu,reference_wu"))
        self.assertEqual(spaced, plain)
        result = kda("stress", "--seed", "4", "--problems", "30", "--device", "cpu", "--json",
                     "--impl", " cpu_wu reference_wu,")
        self.check(result, 0)
        names = {row["impl"] for row in self.lines(result)[-1]["implementations"]}
        self.assertEqual(names, {"cpu_wu", "reference_wu"})

    def test_wrong_variables_are_refused_as_by_verify(self):
        for name, value in (("KDA_WORKSPACE_LIMIT", "x"), ("KDA_IMPL", "nonsense")):
            with self.subTest(name):
                result = kda("stress", "--problems", "2", variables={name: value})
                self.check(result, 2)
                self.assertEqual(result.stdout, "")
                self.assertIn(f'kda: environment variable {name}: found "{value}"', result.stderr)
                self.check(kda("verify", variables={name: value}), 2)
        both = {"KDA_IMPL": "cpu_wu", "KDA_WORKSPACE_LIMIT": "x"}  # has no row for chunk_fwd
        self.check(kda("stress", "--problems", "2", variables=both), 2)
        unread = kda("stress", "--problems", "2", "--impl", "cpu", variables={"KDA_IMPL": "nonsense"})
        self.check(unread, 0)

    def test_variables_change_nothing_that_is_tried(self):
        ask = ("stress", "--seed", "4", "--problems", "12", "--device", "cpu", "--json")
        runs = [kda(*ask), kda(*ask, variables={"KDA_IMPL": "cpu_recurrent",
                                                "KDA_WORKSPACE_LIMIT": "1"})]
        for run in runs:
            self.check(run, 0)
        plain, limited = (self.lines(run)[-1] for run in runs)
        for key in ("problems", "calls", "implementations"):
            self.assertEqual(plain[key], limited[key])

    def test_a_signal_ends_it_with_its_table(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                process = begin("--seconds", "300", "--json")
                process.send_signal(number)
                result = end(process)
                self.check(result, 0)
                (summary,) = self.lines(result)
                self.assertTrue(summary["interrupted"])
                self.assertGreater(summary["calls"], 0)
        process = begin("--seconds", "300")
        process.send_signal(signal.SIGINT)
        result = end(process)
        self.check(result, 0)
        self.assertIn(" failures in ", result.stdout)
        self.assertIn("; a signal came\n", result.stdout)

    def test_a_second_signal_ends_it_at_once(self):
        # This problem takes seconds.
        process = begin("--seed", "4", "--case", "167", "--impl", "reference", "--threads", "1")
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        result = end(process)
        self.check(result, -signal.SIGTERM)
        self.assertEqual(result.stdout, "")
