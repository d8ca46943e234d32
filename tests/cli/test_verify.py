"""kda verify."""

import math
import subprocess

import case_files
from program import DATA, OUTPUTS, PROGRAM, ProgramTest, kda


class Verify(ProgramTest):
    def test_stored_cases_are_right(self):
        files = sorted(DATA.glob("*.safetensors"))
        result = kda("verify", *files, "--json")
        self.check(result, 0)
        *rows, summary = self.lines(result)
        self.assertEqual(summary, {"cases": len(files), "outputs": len(rows), "failed": 0})
        for row in rows:
            self.assertLessEqual(
                {"case", "output", "device", "impl", "ratio", "block_ratio", "limit", "pass"},
                set(row))
            self.assertIs(row["pass"], True)

    def test_the_built_in_suite_is_right(self):
        result = kda("verify")
        self.check(result, 0)
        self.assertIn(" 0 failed", result.stdout)

    def test_a_wrong_value_is_exit_1(self):
        self.write_case(expected__o=case_files.tensor("F32", [1, 3, 1, 2], [9] * 6))
        result = kda("verify", self.case, "--json")
        self.check(result, 1)
        *rows, summary = self.lines(result)
        self.assertEqual(summary["failed"], 1)
        self.assertEqual([row["output"] for row in rows if not row["pass"]], ["o"])
        result = kda("verify", self.case)
        self.check(result, 1)
        self.assertIn("FAIL", result.stdout)

    def test_an_expected_nan_is_never_right(self):
        self.write_case(expected__o=case_files.tensor("F32", [1, 3, 1, 2], [math.nan] * 6))
        self.check(kda("verify", self.case), 1)
        self.check(kda("verify", self.case, "--impl", "reference"), 1)

    def test_a_case_without_expected_values_is_held_to_the_reference(self):
        self.write_case()
        result = kda("verify", self.case, "--json")
        self.check(result, 0)
        self.assertEqual(self.lines(result)[-1]["outputs"], len(OUTPUTS))

    def test_goes_on_after_a_bad_file(self):
        self.write_case()
        bad = self.folder / "bad"
        bad.write_bytes(b"bad")
        result = kda("verify", bad, self.case, self.folder / "missing", self.folder, "--json")
        self.check(result, 2)
        lines = self.lines(result)
        self.assertEqual([line["case"] for line in lines if "error" in line],
                         [str(bad), str(self.folder / "missing"), str(self.folder)])
        self.assertEqual(lines[-1], {"cases": 1, "outputs": len(OUTPUTS), "failed": 0,
                                     "bad_files": 3})
        result = kda("verify", bad, self.case)
        self.check(result, 2)
        self.assertIn("0 failed, 1 bad files", result.stdout)

    def test_an_error_that_is_no_number_is_null(self):
        self.write_case(expected__o=case_files.tensor("F32", [1, 3, 1, 2], [math.nan] * 6))
        rows = self.lines(kda("verify", self.case, "--json"))
        (row,) = [row for row in rows if row.get("output") == "o"]
        self.assertEqual([row["ratio"], row["block_ratio"], row["max_error"]], [None] * 3)
        self.assertIs(row["finite"], False)
        self.assertIs(row["pass"], False)

    def test_a_missing_device_is_exit_3(self):
        result = kda("verify", DATA / "beta_zero.safetensors", "--device", "cuda:4096", "--json")
        self.check(result, 3)
        self.assertIn("CUDA", self.lines(result)[-1]["error"])
        result = kda("verify", "--device", "cuda:4096")
        self.check(result, 3)
        self.assertEqual(result.stdout, "", "not even the header of the table")

    def test_output_that_cannot_be_written_is_no_success(self):
        # Lost at the end, while printing, and object by object.
        for arguments in ([DATA / "beta_zero.safetensors"], [], ["--json"]):
            with open("/dev/full", "w", encoding="utf8") as full:
                result = subprocess.run([PROGRAM, "verify", *arguments], stdout=full, text=True,
                                        stderr=subprocess.PIPE, check=False, timeout=300)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertRegex(result.stderr, r"\Akda: [^\n]+\n\Z")
