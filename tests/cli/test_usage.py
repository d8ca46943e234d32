"""Help, wrong usage and wrong files."""

import os
import resource

import case_files
from program import DATA, ProgramTest, kda


class Help(ProgramTest):
    def test_every_command_explains_itself_with_an_example(self):
        for command in ([], ["run"], ["verify"], ["bench"], ["support"], ["doctor"],
                        ["stress"]):
            result = kda(*command, "--help")
            self.check(result, 0)
            self.assertIn("Example: kda", result.stdout)
            self.assertEqual(result.stderr, "")
        self.assertIn("Exit codes: 0 right, 1 mismatch", kda("--help").stdout)

    def test_version(self):
        self.assertRegex(kda("--version").stdout, r"^kda \d+\.\d+\.\d+\n$")


class BadUsage(ProgramTest):
    def test_is_exit_2_and_one_line(self):
        for arguments in (
            [],
            ["walk"],
            [""],
            ["run"],
            ["run", "a"],
            ["run", "a", "-o", "b", "--threads", "-1"],
            ["run", "a", "-o", "b", "--workspace-limit", "-1"],
            ["bench", "--workspace-limit", "1G"],
            ["verify", "--what"],
            ["bench", "--shape", "1,2,3"],
            ["bench", "--shape", "1,2,3,4,5,x"],
            ["bench", "--shape", "1,64,1,1,32,32", "--shape", "1,2,3"],
            ["bench", "--suite", "sprint"],
            ["bench", "--dtype", "int8"],
            ["bench", "--gate", "relu"],
            ["bench", "--shape", "1,64,2,3,32,32"],
            ["support", "--shape", "1,64,1,1,32,32", "--operation", "fly"],
            ["support", "--shape", "1,64,1,1,999,32"],
            ["verify", DATA / "beta_zero.safetensors", "--device", "tpu"],
            ["verify", DATA / "beta_zero.safetensors", "--impl", "nobody"],
            ["support", "--operation", "fly"],
            ["support", "--device", "tpu"],
            ["support", "--impl", "nobody"],
            ["support", "--dtype", "int8"],
            ["support", "--sequences", "-1", "--shape", "1,64,1,1,32,32"],
            ["support", "--shape", "99999999999999999999,1,1,1,1,1"],
            ["stress", "--seed", "-1"],
            ["stress", "--seconds", "0"],
            ["stress", "--seconds", "nan"],
            ["stress", "--seconds", "inf"],
            ["stress", "--seconds", "1s"],
            ["stress", "--problems", "0"],
            ["stress", "--problems", "9223372036854775808"],
            ["stress", "--case", "9223372036854775808"],
            ["stress", "--case", "-1"],
            ["stress", "--case", "1", "--problems", "2"],
            ["stress", "--device", "tpu"],
            ["stress", "--impl", "nobody"],
            ["doctor", "--device", "tpu"],
            ["doctor", "--impl", "nobody"],
            ["verify", "--device", "gpu"],
            ["verify", "--impl", "nobody"],
            ["bench", "--impl", "nobody"],
            ["support", "--operation", "chunk_fwd", "--pool", "4"],
            ["support", "--pool", "4"],
            ["run", DATA / "beta_zero.safetensors", "-o", ""],
            ["run", DATA / "beta_zero.safetensors", "-o", self.out, "--dtype", "int8"],
        ):
            with self.subTest(arguments):
                result = kda(*arguments)
                self.check(result, 2)
                self.assertRegex(result.stderr, r"\Akda: [^\n]+\n\Z")
                self.assertEqual(result.stdout, "", "not even the header of a table")
                result = kda(*arguments, "--json")
                self.check(result, 2)
                (error,) = self.lines(result)
                self.assertEqual(error["exit_code"], 2)
        self.assertEqual(self.files(), [])

    def test_says_what_was_found(self):
        for arguments, part in (
            (["frob"], 'found command "frob", expected one of run, verify, bench, support, doctor, stress'),
            (["support", "--sequences", "-1", "--shape", "1,1,1,1,1,1"],
             "--sequences: found -1, expected 0 or more"),
            (["support", "--operation", "chunk_fwd", "--pool", "4"],
             "--pool: chunk_fwd has no pool of states, expected --operation recurrent"),
            (["support", "--shape", "1,64,1,1,32,32", "--operation", "intra", "--qk-l2norm"],
             "--qk-l2norm: intra has no normalisation inside, expected --operation chunk_fwd or "
             "chunk_bwd or recurrent"),
            (["support", "--state-dtype", "bf16"],
             "--state-dtype: found without --shape, expected --shape B,T,H,HV,K,V beside it"),
            (["support", "--shape", "99999999999999999999,1,1,1,1,1"],
             "found 99999999999999999999, expected an integer that fits 64 bits"),
            (["stress", "--seed", "18446744073709551616"],
             "found 18446744073709551616, expected an integer from 0 to 2^64 - 1"),
            (["run", DATA / "beta_zero.safetensors", "-o", ""],
             "--out: found an empty name, expected the name of a file"),
            (["run", "", "-o", self.out],
             "CASE: found an empty name, expected the name of a file"),
            (["verify", DATA / "beta_zero.safetensors", ""],
             "CASE: found an empty name, expected the name of a file"),
            (["verify", "no\nsuch\x1b[31m"], "no\\nsuch\\x1b[31m: file: found nothing there"),
        ):
            with self.subTest(arguments):
                self.assertIn(part, kda(*arguments).stderr)


class BadFiles(ProgramTest):
    def test_are_exit_2_with_one_line_that_says_what_is_wrong(self):
        count = 0
        for name, content, part in case_files.bad_files():
            with self.subTest(name):
                self.case.write_bytes(content)
                result = kda("run", self.case, "-o", self.out)
                self.check(result, 2)
                self.assertEqual(result.stdout, "")
                self.assertRegex(result.stderr, r"\Akda: [^\n]+\n\Z")
                self.assertIn(part, result.stderr)
                self.assertLess(len(result.stderr), 500)
                self.assertEqual(self.files(), ["case.safetensors"])
                count += 1
        self.assertGreater(count, 105)

    def test_are_an_object_under_json(self):
        for name, content, part in case_files.bad_files():
            with self.subTest(name):
                self.case.write_bytes(content)
                result = kda("verify", self.case, "--json")
                self.check(result, 2)
                error, summary = self.lines(result)
                self.assertEqual(summary["bad_files"], 1)
                self.assertIn(part, error["error"])
                self.assertEqual(error["kind"], "invalid argument")

    def test_a_wrong_name_is_found_before_the_data_is_read(self):
        # A sparse file of more data than the process may have memory for.
        extent = 2**30
        header = {"wrong": {"dtype": "F32", "shape": [extent], "data_offsets": [0, 4 * extent]}}
        self.case.write_bytes(case_files.container(header, b""))
        os.truncate(self.case, self.case.stat().st_size + 4 * extent)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = kda("verify", self.case, "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.check(result, 2)
        self.assertIn("wrong", self.lines(result)[0]["error"])
        self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0.5)

    def test_every_truncation_of_a_case(self):
        self.write_case()
        content = self.case.read_bytes()
        for size in range(0, len(content), 29):
            self.case.write_bytes(content[:size])
            self.check(kda("run", self.case, "-o", self.out), 2)
        self.assertEqual(self.files(), ["case.safetensors"])
