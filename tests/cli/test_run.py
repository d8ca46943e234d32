"""kda run: results, and a result file that is whole or not there."""

import math
import os
import pathlib
import resource
import signal
import struct
import subprocess
import time

import case_files
from program import DATA, OUTPUTS, PROGRAM, ProgramTest, kda, read_header


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
