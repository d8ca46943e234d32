"""The program kda from outside: exit codes, messages, files and JSON."""

import contextlib
import json
import math
import os
import pathlib
import re
import resource
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import case_files

PROGRAM = os.environ["KDA_PROGRAM"]
DATA = pathlib.Path(__file__).parent.parent / "data"
OUTPUTS = ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"]


def kda(*arguments, **how):
    environment = dict(os.environ)
    environment.pop("KDA_IMPL", None)
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
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


class Run(ProgramTest):
    def test_writes_every_output_with_its_public_dtype(self):
        result = kda("run", DATA / "beta_zero.safetensors", "-o", self.out)
        self.check(result, 0)
        self.assertIn("forward", result.stdout)
        self.assertIn("error", result.stdout)
        header, data = read_header(self.out)
        metadata = header.pop("__metadata__")
        self.assertIn("_chunk_fwd", metadata["forward"])
        self.assertIn("_chunk_bwd", metadata["backward"])
        self.assertEqual(sorted(header), sorted(OUTPUTS))
        self.assertEqual(header["o"]["dtype"], "BF16")
        self.assertEqual(header["dg"]["dtype"], "F32")
        self.assertEqual(header["final_state"]["dtype"], "F32")
        self.assertEqual(header["final_state"]["shape"], [1, 2, 64, 64])
        self.assertEqual(sum(e["data_offsets"][1] - e["data_offsets"][0] for e in header.values()),
                         len(data))

    def test_dtype_fp64_is_the_exact_result(self):
        result = kda("run", DATA / "neg_eigval.safetensors", "-o", self.out, "--dtype", "fp64",
                     "--json")
        self.check(result, 0)
        (summary,) = self.lines(result)
        for name in OUTPUTS:
            self.assertLess(summary["errors"][name]["max_error"], 1e-12, name)
        self.assertGreater(summary["peak_bytes"], 1 << 20)
        header, _ = read_header(self.out)
        self.assertEqual({header[name]["dtype"] for name in OUTPUTS}, {"F64"})

    def test_values_of_a_case_worked_out_by_hand(self):
        # Two tokens, no decay, beta 1: u1 = v1, o1 = q1.k1 v1; token 2 overwrites the same key.
        one = case_files.tensor
        tensors = {
            "q": one("F32", [1, 2, 1, 1], [1, 3]),
            "k": one("F32", [1, 2, 1, 1], [1, 1]),
            "v": one("F32", [1, 2, 1, 1], [5, 7]),
            "g": one("F32", [1, 2, 1, 1], [0, 0]),
            "beta": one("F32", [1, 2, 1], [1, 1]),
        }
        self.case.write_bytes(case_files.case(tensors))
        self.check(kda("run", self.case, "-o", self.out), 0)
        header, data = read_header(self.out)
        begin, end = header["o"]["data_offsets"]
        first, second = struct.unpack("<2f", data[begin:end])
        self.assertTrue(math.isclose(first, 5, rel_tol=1e-6), first)
        self.assertTrue(math.isclose(second, 21, rel_tol=1e-6), second)

    def test_bias_gradient_has_the_shape_of_the_bias(self):
        self.check(kda("run", DATA / "lower_bound_no_alog.safetensors", "-o", self.out), 0)
        header, _ = read_header(self.out)
        self.assertEqual(header["ddt_bias"]["shape"], [128])
        self.assertNotIn("dA_log", header)

    def test_without_do_there_are_no_gradients(self):
        self.case.write_bytes(case_files.case(case_files.small_tensors()))
        self.check(kda("run", self.case, "-o", self.out), 0)
        header, _ = read_header(self.out)
        self.assertEqual(sorted(header), ["__metadata__", "final_state", "o"])

    def test_no_tokens_give_the_state_back(self):
        self.case.write_bytes(case_files.case(case_files.with_gradients(
            case_files.small_tensors(T=0))))
        self.check(kda("run", self.case, "-o", self.out), 0)

    def test_the_result_is_the_same_with_any_number_of_threads(self):
        contents = set()
        for threads in (1, 2, 3):
            self.check(kda("run", DATA / "neg_eigval.safetensors", "-o", self.out, "--threads",
                           threads), 0)
            contents.add(self.out.read_bytes())
        self.assertEqual(len(contents), 1)

    def test_memory_that_nobody_has_is_a_device_error(self):
        # No token, so no data, but states of 2^47 bytes.
        tensors = case_files.small_tensors(T=0, HV=2**20, V=2**24)
        self.case.write_bytes(case_files.case(tensors))
        result = kda("run", self.case, "-o", self.out)
        self.check(result, 4)
        self.assertRegex(result.stderr, r"\Akda: [^\n]+\n\Z")
        self.assertEqual(self.files(), ["case.safetensors"])


    def test_what_is_not_finite_is_said(self):
        self.write_case(v=case_files.tensor("F32", [1, 3, 1, 2], [math.nan] * 6),
                        expected__o=case_files.tensor("F32", [1, 3, 1, 2]))
        result = kda("run", self.case, "-o", self.out, "--json")
        self.check(result, 0)
        (summary,) = self.lines(result)
        self.assertIs(summary["outputs"]["o"]["finite"], False)
        self.assertIs(summary["outputs"]["dv"]["finite"], True)
        self.assertEqual(summary["errors"]["o"],
                         {"ratio": None, "max_error": None, "finite": False})
        self.assertRegex(kda("run", self.case, "-o", self.out).stdout,
                         r"(?m)^warning +NaN or infinity in .*final_state, o$")

    def test_rounding_of_a_16_bit_output_is_beside_its_error(self):
        result = kda("run", DATA / "lm_layer3_safe.safetensors", "-o", self.out, "--json")
        (summary,) = self.lines(result)
        error = summary["errors"]["o"]
        self.assertTrue(1e-3 < error["rounding"] < 2e-3, error)
        self.assertTrue(math.isclose(error["rounding"], error["ratio"], rel_tol=0.02), error)
        self.assertNotIn("rounding", summary["errors"]["final_state"])
        text = kda("run", DATA / "lm_layer3_safe.safetensors", "-o", self.out).stdout
        self.assertIn("(rounding to bf16 alone: 1.", text)

    def test_metadata_format_is_what_writers_add(self):
        self.case.write_bytes(case_files.case(case_files.small_tensors(), {"format": "pt"}))
        self.check(kda("run", self.case, "-o", self.out), 0)

    def test_threads_that_cannot_start_are_no_mismatch(self):
        # Stacks that no address space has room for twice; a runtime may refuse the setting instead.
        result = subprocess.run(
            [PROGRAM, "run", DATA / "lm_layer3_safe.safetensors", "-o", self.out, "--threads", "2"],
            env=dict(os.environ, OMP_STACKSIZE="120000G"), capture_output=True, text=True,
            check=False, timeout=300)
        self.assertIn(result.returncode, (0, 4), result.stderr)
        if result.returncode == 4:
            self.assertEqual(self.files(), [])


class AtomicOutput(ProgramTest):
    def fails(self, *arguments, code=2, **how):
        self.write_case()
        self.out.write_text("old")
        before = self.files()
        self.check(kda("run", self.case, "-o", *arguments, **how), code)
        self.assertEqual(self.out.read_text(), "old")
        self.assertEqual(self.files(), before)

    def test_folder_is_missing(self):
        self.fails(self.folder / "missing" / "out")

    def test_target_is_a_folder(self):
        (self.folder / "sub").mkdir()
        self.fails(self.folder / "sub")

    def test_target_is_a_device(self):
        self.fails("/dev/full")
        self.assertTrue(pathlib.Path("/dev/full").is_char_device())

    def test_target_is_the_case(self):
        self.write_case()
        content = self.case.read_bytes()
        self.check(kda("run", self.case, "-o", self.case), 2)
        self.assertEqual(self.case.read_bytes(), content)

    def test_disk_is_full(self):
        # A limit on the size of files fails the write half-way, as a full disk does. It leaves
        # room for what an OpenMP runtime keeps in shared memory.
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

        self.out.write_text("old")
        result = kda("run", DATA / "neg_eigval.safetensors", "-o", self.out, preexec_fn=limit)
        self.check(result, 2)
        self.assertIn("cannot write", result.stderr)
        self.assertEqual(self.out.read_text(), "old")
        self.assertEqual(self.files(), ["out.safetensors"])

    def test_the_place_is_tried_before_anything_is_computed(self):
        # The states that the case asks for are beyond any memory: computing would be exit 4.
        self.case.write_bytes(case_files.case(case_files.small_tensors(T=0, HV=2**20, V=2**24)))
        result = kda("run", self.case, "-o", self.folder / "missing" / "out")
        self.check(result, 2)
        self.assertIn("cannot create", result.stderr)

    def test_a_signal_leaves_nothing(self):
        big = case_files.small_tensors(T=4096, HV=8, K=64, V=64)
        self.case.write_bytes(case_files.case(big))
        self.out.write_text("old")
        for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            for delay in (0.02, 0.05, 0.1):
                with subprocess.Popen(
                        [PROGRAM, "run", self.case, "-o", self.out], stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL) as process:
                    time.sleep(delay)
                    process.send_signal(ending)
                self.assertIn(process.returncode, (-ending, 0))
                self.assertEqual(self.files(), ["case.safetensors", "out.safetensors"])

    def test_a_name_as_long_as_names_can_be(self):
        self.write_case()
        out = self.folder / ("x" * 255)
        self.check(kda("run", self.case, "-o", out), 0)
        self.check(kda("run", self.case, "-o", out), 0)
        read_header(out)
        self.assertEqual(self.files(), ["case.safetensors", out.name])

    def test_a_link_to_nothing_gets_its_target(self):
        self.write_case()
        (self.folder / "sub").mkdir()
        link = self.folder / "link"
        link.symlink_to("sub/out")
        self.check(kda("run", self.case, "-o", link), 0)
        self.assertTrue(link.is_symlink())
        read_header(self.folder / "sub" / "out")
        link.unlink()
        link.symlink_to("link")
        self.check(kda("run", self.case, "-o", link), 2)
        self.assertTrue(link.is_symlink())

    def test_a_private_file_is_never_public(self):
        self.write_case()
        self.out.write_text("old")
        self.out.chmod(0o600)
        self.check(kda("run", self.case, "-o", self.out, umask=0), 0)
        self.assertEqual(self.out.stat().st_mode & 0o777, 0o600)

    def test_a_new_file_follows_the_umask(self):
        self.write_case()
        self.check(kda("run", self.case, "-o", self.out, umask=0o027), 0)
        self.assertEqual(self.out.stat().st_mode & 0o777, 0o640)

    def test_folder_is_read_only(self):
        self.write_case()
        folder = self.folder / "sub"
        folder.mkdir()
        (folder / "out").write_text("old")
        how = {}
        if os.geteuid() == 0:  # who may write anywhere
            how = {"user": 65534, "group": 65534, "cwd": "/"}
            self.folder.chmod(0o755)
        folder.chmod(0o555)
        try:
            result = kda("run", self.case, "-o", folder / "out", **how)
        except PermissionError:
            self.skipTest("the program lies where an ordinary user cannot run it")
        finally:
            folder.chmod(0o755)
        self.check(result, 2)
        self.assertEqual((folder / "out").read_text(), "old")
        self.assertEqual(len(list(folder.iterdir())), 1)

    def test_a_choice_that_is_of_another_operation_is_exit_3(self):
        self.write_case()
        result = kda("run", self.case, "-o", self.out, "--device", "cpu", "--impl", "cpu_intra")
        self.check(result, 3)
        self.assertIn('implementation: "cpu_intra" has no row for chunk_fwd on cpu; choose '
                      "cpu_chunk_fwd or reference_chunk_fwd\n", result.stderr)
        self.assertEqual(self.files(), ["case.safetensors"])

    def test_a_failed_run_keeps_the_old_file(self):
        self.fails(self.out, "--impl", "nobody")
        self.fails(self.out, "--device", "cuda:4096", code=3)

    def test_a_right_run_replaces_the_old_file_and_keeps_its_mode(self):
        self.write_case()
        self.out.write_text("old")
        self.out.chmod(0o640)
        self.check(kda("run", self.case, "-o", self.out), 0)
        read_header(self.out)
        self.assertEqual(self.out.stat().st_mode & 0o777, 0o640)
        self.assertEqual(self.files(), ["case.safetensors", "out.safetensors"])


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


class Bench(ProgramTest):
    def test_rows_have_times_costs_and_shares(self):
        for suite in ("train", "prefill", "decode", "stages"):
            with self.subTest(suite):
                result = kda("bench", "--suite", suite, "--shape", "1,64,1,2,32,32", "--repeat",
                             "1", "--device", "cpu", "--json")
                self.check(result, 0)
                machine, *rows = self.lines(result)
                self.assertGreater(machine["copy_gb_per_s"], 0)
                self.assertIn("date", machine)
                self.assertGreater(len(rows), 0)
                for row in rows:
                    self.assertLessEqual(row["p20_ms"], row["median_ms"])
                    self.assertLessEqual(row["median_ms"], row["p80_ms"])
                    self.assertGreater(row["median_ms"], 0)
                    self.assertGreater(row["bytes"], 0)
                    self.assertGreater(row["copy_share"], 0)
                    self.assertGreaterEqual(row["flop"], 0)

    def test_the_results_hold_their_command(self):
        result = kda("bench", "--shape", "1,64,1,1,32,32", "--repeat", "1", "--device", "cpu",
                     "--impl", "cpu_chunk_fwd, cpu_chunk_bwd", "--json")
        self.check(result, 0)
        self.assertEqual(self.lines(result)[0]["command"],
                         "kda bench --shape 1,64,1,1,32,32 --repeat 1 --device cpu "
                         "--impl 'cpu_chunk_fwd, cpu_chunk_bwd' --json")

    def test_shapes_are_timed_one_after_the_other(self):
        shapes = ([1, 64, 1, 1, 32, 32], [2, 32, 1, 2, 32, 16])
        arguments = [word for shape in shapes for word in ("--shape", ",".join(map(str, shape)))]
        result = kda("bench", "--suite", "prefill", *arguments, "--repeat", "1", "--device", "cpu",
                     "--json")
        self.check(result, 0)
        self.assertEqual([row["shape"] for row in self.lines(result)[1:]], list(shapes))

    def test_packed_sequences_are_timed(self):
        result = kda("bench", "--suite", "prefill", "--shape", "1,48,1,2,32,32", "--lengths",
                     "16,0,31,1", "--repeat", "1", "--device", "cpu", "--json")
        self.check(result, 0)
        _, row = self.lines(result)
        self.assertEqual((row["sequences"], row["shape"]), (4, [1, 48, 1, 2, 32, 32]))

    def test_a_step_that_keeps_its_states_moves_them_too(self):
        moved = []
        for more in ((), ("--checkpoints",)):
            result = kda("bench", "--suite", "train", "--shape", "1,100,1,2,32,16", "--dtype",
                         "fp32", "--repeat", "1", "--device", "cpu", "--json", *more)
            self.check(result, 0)
            moved.append([row["bytes"] for row in self.lines(result)[1:]])
        h = 2 * 2 * 32 * 16 * 4  # two chunks, two heads
        self.assertEqual(moved[1], [bytes + h for bytes in moved[0]])
        result = kda("bench", "--suite", "decode", "--checkpoints", "--device", "cpu", "--json")
        self.check(result, 2)
        self.assertIn("decode", self.lines(result)[-1]["error"])

    def test_lengths_that_do_not_fit_are_named(self):
        for arguments, found in ((("--shape", "1,48,1,2,32,32", "--lengths", "16,31"), "sum is 47"),
                                 (("--shape", "2,48,1,2,32,32", "--lengths", "48"), "B = 2"),
                                 (("--shape", "1,4,1,1,32,32", "--lengths", "5,-1"),
                                  "--lengths: found -1, expected 0 or more"),
                                 (("--shape", "1,4,1,1,32,32", "--lengths", f"{2**63 - 1},5"),
                                  "--lengths: found a sum beyond 64 bits"),
                                 (("--lengths", "48"), "0 of --shape"),
                                 (("--shape", "1,48,1,2,32,32") * 2 + ("--lengths", "48"),
                                  "2 of --shape"),
                                 (("--suite", "decode", "--lengths", "48"), "decode")):
            with self.subTest(found):
                result = kda("bench", "--device", "cpu", "--json", *arguments)
                self.check(result, 2)
                (error,) = self.lines(result)
                self.assertIn(found, error["error"])

    def test_the_cost_of_a_call_is_a_matter_of_devices(self):
        result = kda("bench", "--suite", "host", "--repeat", "1", "--device", "cpu", "--json")
        self.check(result, 3)
        for row in self.lines(result)[1:]:
            self.assertEqual(row["kind"], "unsupported")
            self.assertIn("on the CPU the call is the computation", row["error"])

    def test_bytes_and_flop_of_a_shape_are_those_of_the_formulae(self):
        result = kda("bench", "--shape", "1,64,1,1,128,128", "--repeat", "1", "--device", "cpu",
                     "--json")
        self.check(result, 0)
        _, forward, backward = self.lines(result)
        # 1282 bytes a token: bf16 q, k, v, o, g, beta; then the fp32 state, A_log and dt_bias.
        self.assertEqual(forward["bytes"], 64 * 1282 + 4 * (128 * 128 + 1 + 128))
        self.assertEqual(forward["flop"], 64 * (6 * 128 * 128 + 10 * 64 * 128))
        self.assertEqual(backward["flop"],
                         64 * (16 * 128 * 128 + 24 * 64 * 128 + 4 * 64 * 64))


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


class SupportAndDoctor(ProgramTest):
    def test_support_lists_everything(self):
        rows = self.lines(kda("support", "--json"))
        names = [row["impl"] for row in rows]
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("reference_chunk_fwd", names)

    def test_support_lists_what_is_asked_for(self):
        rows = self.lines(kda("support", "--operation", "chunk_fwd", "--impl",
                              "reference,cpu_chunk_fwd", "--device", "cpu", "--json"))
        self.assertEqual({row["impl"] for row in rows}, {"cpu_chunk_fwd", "reference_chunk_fwd"})
        self.check(kda("support", "--device", "cuda:4096"), 3)

    def test_every_implementation_can_be_named_alone(self):
        for row in self.lines(kda("support", "--device", "cpu", "--json")):
            result = kda("support", "--device", "cpu", "--impl", row["impl"], "--json")
            self.check(result, 0)
            self.assertEqual([found["impl"] for found in self.lines(result)], [row["impl"]])

    def test_support_asks_about_states(self):
        ask = ("support", "--shape", "4,1,2,2,32,32", "--operation", "recurrent", "--json")
        rows = self.lines(kda(*ask, "--device", "cpu", "--state-dtype", "bf16", "--pool", "6"))
        self.assertTrue(any(row["chosen"] for row in rows))
        wrong = kda(*ask, "--state-dtype", "int8")
        self.check(wrong, 2)
        self.assertIn("--state-dtype: found int8", wrong.stdout)
        self.check(kda(*ask, "--pool", "-1"), 2)

    def test_support_says_the_workspace_and_keeps_to_a_limit(self):
        ask = ("support", "--shape", "4,100,2,2,32,32", "--operation", "chunk_fwd", "--device",
               "cpu", "--threads", "4", "--impl", "cpu", "--json", "--workspace-limit")
        needed = [self.lines(kda(*ask, limit))[0]["workspace_bytes"] for limit in (0, 10**9)]
        self.assertGreater(needed[0], 0)
        self.assertEqual(needed[0], needed[1])
        less = self.lines(kda(*ask, needed[0] - 1))[0]
        self.assertTrue(less["chosen"])
        self.assertLess(less["workspace_bytes"], needed[0])
        refused = kda(*ask, 1)
        self.check(refused, 3)
        self.assertIn("workspace_limit: found 1 bytes, expected ", refused.stdout)
        self.assertIn(f"workspace {needed[0]} bytes", kda(*ask[:-2]).stdout)

    def test_run_and_bench_keep_to_a_limit(self):
        case = DATA / "beta_zero.safetensors"
        out = self.folder / "limited.safetensors"
        for command in (("run", case, "-o", out),
                        ("bench", "--shape", "1,64,1,1,32,32", "--repeat", "1")):
            self.check(kda(*command, "--device", "cpu", "--workspace-limit", "1"), 3)
            self.check(kda(*command, "--device", "cpu", "--workspace-limit", 10**9), 0)

    def test_support_goes_on_where_the_choice_has_nothing(self):
        result = kda("support", "--shape", "1,64,1,1,32,32", "--device", "cpu", "--impl",
                     "cpu_intra", "--json")
        self.check(result, 3)
        rows = self.lines(result)
        self.assertEqual([row["impl"] for row in rows if row.get("chosen")], ["cpu_intra"])
        refused = [row for row in rows if "error" in row]
        self.assertEqual(len(refused), 10)
        self.assertEqual({(row["exit_code"], row["kind"]) for row in refused},
                         {(3, "unsupported")})

    def test_support_tells_what_a_gpu_that_is_not_here_would_lack(self):
        report = self.lines(kda("doctor", "--device", "cpu", "--json"))[0]
        built = {row["impl"] for row in self.lines(kda("support", "--json"))}
        ask = ("support", "--operation", "chunk_fwd", "--device", "cuda", "--json", "--shape")
        result = kda(*ask, "1,64,1,1,100,64")
        if "sm90_chunk_fwd" not in built:
            self.check(result, 3)
            self.assertIn("this build has no CUDA", result.stderr)
            return
        (reason,) = [row["reason"] for row in self.lines(result)
                     if row["impl"] == "sm90_chunk_fwd"]
        self.assertIn("K = 100 (64 or 128)", reason)
        named = self.lines(kda(*ask[:3], "--impl", "sm90", "--json", "--shape", "1,64,1,1,100,64"))
        self.assertEqual({row["impl"]: row["reason"] for row in named}["sm90_chunk_fwd"], reason)
        if report["cuda"] != "usable":
            self.check(result, 3)
            self.assertEqual(reason, report["cuda"] + ", and K = 100 (64 or 128)")
            fits = self.lines(kda(*ask, "1,64,1,1,128,64"))
            self.assertEqual({row["reason"] for row in fits}, {report["cuda"]})

    def test_support_says_what_is_chosen(self):
        result = kda("support", "--shape", "1,100,2,4,64,64", "--gate", "softplus", "--device",
                     "cpu", "--qk-l2norm", "--beta-sigmoid", "--sequences", "3", "--json")
        self.check(result, 0)
        rows = self.lines(result)
        operations = {row["operation"] for row in rows}
        self.assertEqual(len(operations), 11)
        for operation in operations:
            chosen = [row for row in rows if row["operation"] == operation and row["chosen"]]
            self.assertEqual(len(chosen), 1, operation)
            self.assertTrue(chosen[0]["supported"])
        for row in rows:
            self.assertEqual(row["supported"], row["reason"] == "")

    def test_doctor_passes_its_self_test(self):
        result = kda("doctor", "--device", "cpu", "--json")
        self.check(result, 0)
        (report,) = self.lines(result)
        self.assertEqual(report["devices"][0]["self_test"], "passed")
        self.assertRegex(kda("doctor", "--device", "cpu").stdout, r"(?m)^self-test +passed")

    def test_doctor_of_a_missing_device_is_exit_3(self):
        self.check(kda("doctor", "--device", "cuda:4096"), 3)


if __name__ == "__main__":
    unittest.main()
